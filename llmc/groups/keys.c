// Key files: see keys.h.
#include "llmc/groups/keys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "llmc/base/durable.h"

enum { MOST_KEY_FILE = 256 };

static void key_path(char *path, size_t bytes, const char *folder, const char *name, const char *kind) {
    snprintf(path, bytes, "%s/%s.%s", folder, name, kind);
}

static bool key_exists(const char *path, Error *err) {
    return usage_error(err, "%s exists; remove it to make a new key, or choose another name", path);
}

static bool write_key(const char *folder, const char *name, const char *kind, const char *key, Error *err) {
    char path[4096];
    key_path(path, sizeof path, folder, name, kind);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0 && errno == EEXIST) return key_exists(path, err);
    char line[KEY_TEXT + 1];
    snprintf(line, sizeof line, "%s\n", key);
    bool good = file >= 0 && write_all(file, line, strlen(line)) && fsync(file) == 0;
    int reason = errno;
    if (file >= 0 && close(file) != 0) good = false;
    if (good) return true;
    if (file >= 0) unlink(path);
    return system_error(err, "cannot write %s: %s; check the folder", path, strerror(reason));
}

bool keys_generate(const char *folder, const char *name, Error *err) {
    char public_key[KEY_TEXT], secret_key[KEY_TEXT];
    if (!name_valid(name)) {
        return usage_error(
            err,
            "'%.64s' is not a name of a group; use 1 to 32 letters, digits, '-', '_' or '.', not "
            "beginning with '-' or '.'",
            name);
    }
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return system_error(err, "cannot create %s: %s; choose another folder", folder, strerror(errno));
    for (int i = 0; i < 2; i++) {  // before the first is written: a half of a pair is of no use
        char path[4096];
        key_path(path, sizeof path, folder, name, i ? "public" : "secret");
        if (durable_exists(path)) return key_exists(path, err);
    }
    if (zmq_curve_keypair(public_key, secret_key) != 0)
        return system_error(err,
                            "this libzmq has no CURVE encryption; install one that was built with libsodium");
    bool secret = write_key(folder, name, "secret", secret_key, err);
    memset(secret_key, 0, sizeof secret_key);
    if (!secret || write_key(folder, name, "public", public_key, err)) return secret;
    char path[4096];
    key_path(path, sizeof path, folder, name, "secret");
    unlink(path);
    return false;
}

bool keys_exist(const char *folder, const char *name) {
    char path[4096];
    key_path(path, sizeof path, folder, name, "secret");
    return durable_exists(path);
}

static bool read_key(const char *path, char key[KEY_TEXT], Error *err) {
    uint64_t bytes;
    uint8_t raw[KEY_RAW];
    char *text = durable_read_file(path, MOST_KEY_FILE, &bytes, err);
    if (!text) {
        return system_error(err,
                            "cannot read the key %s; make keys with build/rendezvous keygen, and copy the "
                            "files of this group",
                            path);
    }
    text[strcspn(text, "\r\n ")] = '\0';
    bool good = strlen(text) == KEY_TEXT - 1 && zmq_z85_decode(raw, text);
    if (good) memcpy(key, text, KEY_TEXT);
    free(text);
    return good || system_error(err, "%s does not hold a key; make keys with build/rendezvous keygen", path);
}

bool keys_load_public(const char *folder, const char *name, char key[KEY_TEXT], Error *err) {
    char path[4096];
    key_path(path, sizeof path, folder, name, "public");
    return read_key(path, key, err);
}

// As ssh: a key that others can read is not secret.
static bool only_for_owner(const char *path, Error *err) {
    struct stat status;
    unsigned others = stat(path, &status) == 0 ? status.st_mode & 077 : 0;
    return !others ||
           system_error(err, "other users can use the secret key %s; run chmod 600 %s", path, path);
}

bool keys_load(const char *folder, const char *name, Keys *keys, Error *err) {
    char path[4096];
    *keys = (Keys){.name = ""};
    if (!name_valid(name)) {
        return usage_error(
            err,
            "'%.64s' is not a name of a group; use 1 to 32 letters, digits, '-', '_' or '.', not "
            "beginning with '-' or '.'",
            name);
    }
    message_name(keys->name, name);
    key_path(path, sizeof path, folder, name, "secret");
    return only_for_owner(path, err) && read_key(path, keys->secret_key, err) &&
           keys_load_public(folder, name, keys->public_key, err) &&
           keys_load_public(folder, SERVER_NAME, keys->server_key, err);
}

// Calls found() for every file NAME.<kind> until it returns true.
typedef bool (*FoundKey)(void *context, const char *folder, const char *name);
static bool list_keys(const char *folder, const char *kind, FoundKey found, void *context) {
    DIR *listing = opendir(folder);
    bool stop = false;
    for (struct dirent *entry; listing && !stop && (entry = readdir(listing));) {
        char name[NAME_BYTES] = "";
        const char *dot = strrchr(entry->d_name, '.');
        size_t length = dot ? (size_t)(dot - entry->d_name) : NAME_BYTES;
        if (length >= NAME_BYTES || strcmp(dot + 1, kind) != 0) continue;
        memcpy(name, entry->d_name, length);
        stop = name_valid(name) && found(context, folder, name);
    }
    if (listing) closedir(listing);
    return stop;
}

static bool add_key(void *context, const char *folder, const char *name) {
    KeyRing *ring = (KeyRing *)context;
    Error err = {0};
    ring->name = grow_array(ring->name, ring->count, sizeof *ring->name, "public keys");
    ring->key = grow_array(ring->key, ring->count, sizeof *ring->key, "public keys");
    message_name(ring->name[ring->count], name);
    if (keys_load_public(folder, name, ring->key[ring->count], &err)) ring->count++;
    return false;
}

static int index_of(const KeyRing *ring, const char *key) {
    for (int i = 0; i < ring->count; i++) {
        if (strcmp(ring->key[i], key) == 0) return i;
    }
    return -1;
}

static void read_folder(KeyRing *ring, const char *folder, struct timespec changed) {
    ring->count = 0;
    ring->changed = changed;
    ring->read_at = monotonic_seconds();
    ring->reads++;
    list_keys(folder, "public", add_key, ring);
}

bool keys_find(KeyRing *ring, const char *folder, const uint8_t *raw, char name[NAME_BYTES]) {
    char key[KEY_TEXT];
    struct stat status = {0};
    zmq_z85_encode(key, raw, KEY_RAW);
    stat(folder, &status);
    bool same = ring->read_at > 0 && ring->changed.tv_sec == status.st_mtim.tv_sec &&
                ring->changed.tv_nsec == status.st_mtim.tv_nsec;
    if (!same) read_folder(ring, folder, status.st_mtim);
    else if (index_of(ring, key) < 0 && monotonic_seconds() > ring->read_at + 1)
        read_folder(ring, folder, status.st_mtim);
    int i = index_of(ring, key);
    if (i >= 0) message_name(name, ring->name[i]);
    return i >= 0;
}

void keys_free(KeyRing *ring) {
    free(ring->name);
    free(ring->key);
    *ring = (KeyRing){0};
}

typedef struct Wanted {
    char name[NAME_BYTES];
    int count;
} Wanted;

static bool any_pair(void *context, const char *folder, const char *name) {
    Wanted *wanted = (Wanted *)context;
    message_name(wanted->name, name);
    wanted->count++;
    return strcmp(name, SERVER_NAME) == 0;
}

bool keys_find_pair(const char *folder, char name[NAME_BYTES], Error *err) {
    Wanted wanted = {.name = ""};
    bool server = list_keys(folder, "secret", any_pair, &wanted);
    message_name(name, wanted.name);
    return server || wanted.count == 1 ||
           system_error(
               err, "%s has %d secret keys; give a folder with the keys of the rendezvous or of one group",
               folder, wanted.count);
}
