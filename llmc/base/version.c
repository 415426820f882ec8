// Version of the build: see version.h. The Makefile passes commit and version to this file only.
#include "llmc/base/version.h"

#include <cjson/cJSON.h>
#include <mpi.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

const char *version_number(void) { return LLMC_VERSION; }
const char *version_commit(void) { return LLMC_COMMIT; }

void version_unicode(char *text, size_t bytes) {
    char library[64] = "unknown", tables[64] = "unknown";
    pcre2_config(PCRE2_CONFIG_VERSION, library);
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, tables);
    library[strcspn(library, " ")] = 0;  // the release date follows
    snprintf(text, bytes, "PCRE2 %s, Unicode %s", library, tables);
}

void version_libraries(char *text, size_t bytes) {
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING], pcre2[64];
    int length = 0;
    MPI_Get_library_version(mpi, &length);
    mpi[strcspn(mpi, ",\n")] = 0;  // build host and date follow
    version_unicode(pcre2, sizeof pcre2);
    snprintf(text, bytes, "%s, xxHash %u, cJSON %s, %s", mpi, XXH_versionNumber(), cJSON_Version(), pcre2);
}
