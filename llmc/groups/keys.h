// Key files of a run. A folder has a pair NAME.public, NAME.secret for every group and for the
// rendezvous (name "server"), one Z85 key of CURVE (40 characters) each, mode 0600. The rendezvous
// needs server.secret and the public keys of all groups; a group needs its own pair and
// server.public.
#pragma once
#include <time.h>

#include "llmc/groups/frame.h"
LLMC_BEGIN

#define SERVER_NAME "server"
enum { KEY_TEXT = 41, KEY_RAW = 32 };

typedef struct Keys {
    char name[NAME_BYTES];
    char public_key[KEY_TEXT], secret_key[KEY_TEXT];
    char server_key[KEY_TEXT];  // public key of the rendezvous
} Keys;

// Creates the folder (mode 0700) and a new pair of files. Existing files are an error (EXIT_USAGE).
bool keys_generate(const char *folder, const char *name, Error *err);
bool keys_exist(const char *folder, const char *name);
// Reads a pair and server.public. Error: EXIT_ENVIRONMENT, also if NAME.secret has a mode that lets
// others use it.
bool keys_load(const char *folder, const char *name, Keys *keys, Error *err);
// Reads NAME.public.
bool keys_load_public(const char *folder, const char *name, char key[KEY_TEXT], Error *err);
// The public keys of a folder. They are read again if files were added or removed, and at most once
// a second for a key that is not among them, so that groups can be added while the rendezvous runs
// but strangers cannot make it read the folder all the time. Zero-initialize.
typedef struct KeyRing {
    char (*name)[NAME_BYTES], (*key)[KEY_TEXT];  // (count)
    int count;
    struct timespec changed;  // of the folder when it was read
    double read_at;           // monotonic_seconds; 0: never
    int64_t reads;
} KeyRing;
// Finds the name of a public key (KEY_RAW bytes) in the folder.
bool keys_find(KeyRing *ring, const char *folder, const uint8_t *raw, char name[NAME_BYTES]);
void keys_free(KeyRing *ring);
// Finds a pair for a client without a name: the server's, or else the only one in the folder.
bool keys_find_pair(const char *folder, char name[NAME_BYTES], Error *err);

LLMC_END
