// Memory of this machine: see machine.h.
#include "llmc/base/machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t machine_memory(const char *field) {
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) return 0;
    char line[256];
    unsigned long long kilobytes = 0;
    size_t length = strlen(field);
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, field, length) == 0 && line[length] == ':') {
            kilobytes = strtoull(line + length + 1, NULL, 10);
            break;
        }
    }
    fclose(file);
    return (size_t)kilobytes * 1024;
}
