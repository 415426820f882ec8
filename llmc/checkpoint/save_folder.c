// Manages a --save folder. See save_folder.h. Called by one rank.
#include "llmc/checkpoint/save_folder.h"

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/durable.h"
#include "llmc/base/json_line.h"
#include "llmc/checkpoint/manifest.h"

enum { SPACE_MARGIN_BYTES = 1 << 20, OTHERS_SHOWN = 6 };

// --- Lock ----------------------------------------------------------------------------------------

static const char LOCK_NAME[] = ".lock";

bool save_folder_lock(const char *directory, double seconds, SaveLock *lock, Error *err) {
    assert(seconds >= 0);
    const struct timespec pause = {0, 100000000};
    int reason = 0;
    *lock = NO_SAVE_LOCK;
    int folder = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (double waited = 0; folder >= 0; waited += 0.1) {
        int file = lock_file(folder, LOCK_NAME);
        if (file >= 0) {
            *lock = (SaveLock){folder, file};
            return true;
        }
        reason = errno;
        if (reason != EWOULDBLOCK || waited >= seconds) break;
        nanosleep(&pause, NULL);
    }
    if (folder >= 0) close(folder);
    if (reason == EWOULDBLOCK)
        return ckpt_error(
            err, "another job is saving into %s; stop it, or choose another --save folder for this job",
            directory);
    return reason != EEXIST || ckpt_error(err,
                                          "%s/%s belongs to another user or is a link; remove it if no job "
                                          "is saving there, or choose another --save folder",
                                          directory, LOCK_NAME);
}

void save_folder_unlock(SaveLock *lock) {
    unlock_file(lock->folder, LOCK_NAME, lock->file);
    if (lock->folder >= 0) close(lock->folder);
    *lock = NO_SAVE_LOCK;
}

// Returns true if the path refers to another folder. If stat fails, returns false; the save itself
// will report the error.
static bool is_elsewhere(const char *directory, int folder) {
    struct stat held, named;
    if (stat(directory, &named) != 0) return errno == ENOENT || errno == ENOTDIR;
    return fstat(folder, &held) != 0 || held.st_dev != named.st_dev || held.st_ino != named.st_ino;
}

bool save_folder_follow(const char *directory, SaveLock *lock, bool *moved, Error *err) {
    *moved = lock->folder >= 0 && is_elsewhere(directory, lock->folder);
    if (!*moved) return true;
    // Releases the old lock first: if a file system reports two inode numbers for one folder, the
    // job must not conflict with its own lock.
    save_folder_unlock(lock);
    return durable_make_folders(directory, err) && save_folder_lock(directory, 0, lock, err);
}

// --- Leftovers -----------------------------------------------------------------------------------

// Returns true for ".iter_<digits><suffix>".
static bool is_leftover(const char *name, const char *suffix) {
    if (strncmp(name, ".iter_", 6) != 0) return false;
    const char *p = name + 6;
    while (isdigit((unsigned char)*p)) p++;
    return p > name + 6 && strcmp(p, suffix) == 0;
}

// Restores iter_N from ".iter_N.old" if the save that replaced it was killed between its two
// renames: then this is the only copy.
static bool restore_aside(const char *directory, const char *name, Error *err) {
    char *aside = text_format("%s/%s", directory, name);
    char *final = text_format("%s/%.*s", directory, (int)(strlen(name) - 1 - strlen(".old")), name + 1);
    bool ok = durable_exists(final) ? durable_remove_tree(aside, err)
                                    : rename(aside, final) == 0 || durable_error(err, "rename to", final);
    free(aside);
    free(final);
    return ok;
}

bool save_folder_clear(const char *directory, Error *err) {
    DIR *folder = opendir(directory);
    if (!folder) return durable_error(err, "open folder", directory);
    bool ok = true;
    struct dirent *entry;
    while (ok && (entry = readdir(folder))) {
        if (is_leftover(entry->d_name, ".old")) {
            ok = restore_aside(directory, entry->d_name, err);
        } else if (is_leftover(entry->d_name, ".tmp") || is_leftover(entry->d_name, ".del")) {
            char *path = text_format("%s/%s", directory, entry->d_name);
            ok = durable_remove_tree(path, err);
            free(path);
        }
    }
    closedir(folder);
    return ok;
}

bool save_folder_names_free(const char *directory, Error *err) {
    static const char *const names[] = {CHECKPOINT_TRACKER, "." CHECKPOINT_TRACKER ".tmp", LINEAGE_NAME,
                                        "." LINEAGE_NAME ".tmp"};
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof names / sizeof *names; i++) {
        struct stat status;
        char *path = text_format("%s/%s", directory, names[i]);
        bool taken = lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
        ok = !taken ||
             ckpt_error(err, "%s is a folder, but every save writes a file of this name; remove it", path);
        free(path);
    }
    return ok;
}

// --- Free space ----------------------------------------------------------------------------------

// Returns the bytes available for checkpoints and the bytes that one needs. Returns false if the
// file system does not report free space, like some network file systems; a full disk then fails
// during the write.
static bool free_space(const char *directory, uint64_t bytes, uint64_t *available, uint64_t *needed) {
    struct statvfs fs;
    if (statvfs(directory, &fs) != 0 || fs.f_blocks == 0) return false;
    uint64_t left = (uint64_t)fs.f_bavail * fs.f_frsize;
    *available = left > SPACE_MARGIN_BYTES ? left - SPACE_MARGIN_BYTES : 0;
    *needed = bytes + bytes / 1000;  // includes headers and the manifest
    return true;
}

enum { SIZE_TEXT = 32 };

// Formats a size like "1.234 GB", in the largest of GB, MB and kB that gives at least 1. text:
// SIZE_TEXT bytes.
static const char *size_text(uint64_t bytes, char *text) {
    const char *unit = bytes >= 1000000000 ? "GB" : bytes >= 1000000 ? "MB" : "kB";
    double scale = bytes >= 1000000000 ? 1e9 : bytes >= 1000000 ? 1e6 : 1e3;
    snprintf(text, SIZE_TEXT, "%.3f %s", (double)bytes / scale, unit);
    return text;
}

bool save_folder_allows_file(uint64_t bytes, Error *err) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur)
        return true;
    char size[SIZE_TEXT], most[SIZE_TEXT];
    return ckpt_error(err,
                      "this rank's shard of a checkpoint has %s, but its file size limit is %s; raise the "
                      "limit (ulimit -f)",
                      size_text(bytes, size), size_text(limit.rlim_cur, most));
}

bool save_folder_has_room(const char *directory, uint64_t bytes, Error *err) {
    uint64_t available, needed;
    if (!free_space(directory, bytes, &available, &needed) || needed <= available) return true;
    if (!save_folder_clear(directory, err)) return false;
    if (!free_space(directory, bytes, &available, &needed) || needed <= available) return true;
    char size[SIZE_TEXT], left[SIZE_TEXT];
    return ckpt_error(err,
                      "a checkpoint of %s does not fit in %s, which has %s left; free some space or choose "
                      "another folder with --save",
                      size_text(needed, size), directory, size_text(available, left));
}

// --- Checkpoints in the folder -------------------------------------------------------------------

// Returns the iteration of a folder named iter_N, or -1 for other names.
static int64_t iteration_of(const char *name) {
    char canonical[40];
    const char *digits = name + 5;
    if (strncmp(name, "iter_", 5) != 0) return -1;
    if (strlen(digits) > LINEAGE_DIGITS || strspn(digits, "0123456789") != strlen(digits)) return -1;
    int64_t iteration = strtoll(digits, NULL, 10);
    snprintf(canonical, sizeof canonical, "iter_%07" PRId64, iteration);
    return strcmp(name, canonical) == 0 ? iteration : -1;
}

bool save_folder_holds(const char *directory, int64_t iteration) {
    char *manifest = text_format("%s/iter_%07" PRId64 "/" MANIFEST_NAME, directory, iteration);
    bool there = durable_exists(manifest);
    free(manifest);
    return there;
}

bool save_folder_in_use(const char *directory, int64_t iteration) {
    bool used = save_folder_holds(directory, iteration) || save_folder_holds(directory, iteration + 1);
    for (int64_t i = iteration - 1; !used && i <= iteration + 1; i++) {
        char *fresh = text_format("%s/.iter_%07" PRId64 ".tmp", directory, i);
        used = durable_exists(fresh);
        free(fresh);
    }
    return used;
}

bool save_folder_same(const char *a, const char *b) {
    struct stat one, other;
    return stat(a, &one) == 0 && stat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

static int oldest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int64_t *save_folder_list(const char *directory, int *count) {
    DIR *folder = opendir(directory);
    int64_t *list = NULL;
    *count = 0;
    if (!folder) return NULL;
    for (struct dirent *entry; (entry = readdir(folder));) {
        int64_t iteration = iteration_of(entry->d_name);
        if (iteration < 0 || !save_folder_holds(directory, iteration)) continue;
        list = grow_array(list, *count, sizeof *list, "the list of checkpoints");
        list[(*count)++] = iteration;
    }
    closedir(folder);
    if (list) qsort(list, (size_t)*count, sizeof *list, oldest_first);
    return list;
}

// --- Lineage -------------------------------------------------------------------------------------

static void append(Lineage *l, int64_t iteration) {
    l->iterations = grow_array(l->iterations, l->count, sizeof *l->iterations,
                               "the run's list of checkpoints");
    l->iterations[l->count++] = iteration;
}

void lineage_free(Lineage *l) {
    free(l->iterations);
    memset(l, 0, sizeof *l);
}

// Parses ascending lines of digits; the last newline may be missing.
static bool parse(Lineage *l, const char *text, uint64_t bytes) {
    const char *end = text + bytes;
    for (const char *p = text; p < end;) {
        int64_t iteration = 0;
        const char *digits = p;
        while (p < end && p - digits <= LINEAGE_DIGITS && isdigit((unsigned char)*p)) {
            iteration = 10 * iteration + (*p++ - '0');
        }
        bool number = p > digits && p - digits <= LINEAGE_DIGITS && (p == end || *p == '\n');
        if (!number || (l->count > 0 && iteration <= l->iterations[l->count - 1])) {
            snprintf(l->damage, sizeof l->damage,
                     "line %d is not an iteration number greater than the previous one", l->count + 1);
            return false;
        }
        append(l, iteration);
        p++;
    }
    if (l->count == 0) snprintf(l->damage, sizeof l->damage, "it is empty");
    return l->count > 0;
}

static bool read_file(const char *path, Lineage *l, Error *err) {
    uint64_t bytes;
    if (!durable_exists(path)) return true;
    if (!durable_plain_file(path, LINEAGE_MAX_BYTES)) {
        snprintf(l->damage, sizeof l->damage, "it is not a plain file of at most %d bytes",
                 LINEAGE_MAX_BYTES);
        return true;
    }
    char *text = durable_read_file(path, LINEAGE_MAX_BYTES, &bytes, err);
    if (!text) return false;
    l->listed = parse(l, text, bytes);
    free(text);
    return true;
}

bool lineage_read(const char *directory, Lineage *l, Error *err) {
    memset(l, 0, sizeof *l);
    char *path = text_format("%s/" LINEAGE_NAME, directory);
    bool ok = read_file(path, l, err);
    free(path);
    if (!ok || l->listed) return ok;
    free(l->iterations);
    l->iterations = save_folder_list(directory, &l->count);
    return true;
}

char *lineage_text(const Lineage *l, uint64_t *bytes) {
    Text text = {0};
    for (int i = l->count > LINEAGE_MOST ? l->count - LINEAGE_MOST : 0; i < l->count; i++)
        text_add(&text, "%" PRId64 "\n", l->iterations[i]);
    *bytes = text.length;
    return text.data;
}

int64_t lineage_before(const Lineage *l, int64_t iteration) {
    int i = 0;
    while (i < l->count && l->iterations[i] < iteration) i++;
    return i > 0 ? l->iterations[i - 1] : -1;
}

bool lineage_holds(const Lineage *l, int64_t iteration) {
    return lineage_before(l, iteration + 1) == iteration && iteration >= 0;
}

bool lineage_extend(const char *directory, int64_t before, int64_t iteration, Lineage *l, Error *err) {
    assert(iteration >= 0);
    Lineage old;
    memset(l, 0, sizeof *l);
    if (!lineage_read(directory, &old, err)) return false;
    l->listed = old.listed;
    memcpy(l->damage, old.damage, sizeof l->damage);
    bool known = !old.listed || lineage_holds(&old, before);
    for (int i = 0; known && i < old.count; i++) {
        bool earlier = old.iterations[i] < before && old.iterations[i] < iteration;
        if (earlier && save_folder_holds(directory, old.iterations[i])) append(l, old.iterations[i]);
    }
    if (before >= 0 && before < iteration && save_folder_holds(directory, before)) append(l, before);
    append(l, iteration);
    lineage_free(&old);
    return true;
}

void lineage_others(const char *directory, const Lineage *l, char *text, size_t text_bytes) {
    Lineage others = {NULL, 0, false, ""};
    int there, used = 0;
    int64_t *list = save_folder_list(directory, &there);
    for (int i = 0; i < there; i++) {
        if (!lineage_holds(l, list[i])) append(&others, list[i]);
    }
    *text = 0;
    if (others.count > OTHERS_SHOWN) {
        snprintf(text, text_bytes, "%" PRId64 " to %" PRId64 ", %d in all", others.iterations[0],
                 others.iterations[others.count - 1], others.count);
    } else {
        for (int i = 0; i < others.count; i++) {
            const char *between = i == 0 ? "" : i + 1 < others.count ? ", " : " and ";
            size_t left = text_bytes - (size_t)used;
            used += snprintf(text + used, left, "%s%" PRId64, between, others.iterations[i]);
        }
    }
    free(list);
    lineage_free(&others);
}

// --- Retention -----------------------------------------------------------------------------------

// Renames iter_N to .iter_N.del or, if `renamed`, deletes .iter_N.del.
static bool retire(const char *directory, int64_t iteration, bool renamed, Error *err) {
    char *final = text_format("%s/iter_%07" PRId64, directory, iteration);
    char *away = text_format("%s/.iter_%07" PRId64 ".del", directory, iteration);
    bool ok = renamed ? durable_remove_tree(away, err)
                      : rename(final, away) == 0 || durable_error(err, "rename", final);
    free(final);
    free(away);
    return ok;
}

bool save_folder_prune(const char *directory, const Lineage *line, const Retention *keep, Error *err) {
    bool ok = true;
    if (keep->last <= 0) return true;
    for (int renamed = 0; ok && renamed < 2; renamed++) {
        // Makes the renames durable before deleting the contents, so that a power failure cannot
        // leave a partial checkpoint under a regular name.
        if (renamed) ok = durable_sync_folder(directory, err);
        for (int i = 0; ok && i < line->count; i++) {
            int64_t iteration = line->iterations[i];
            bool stays = line->count - 1 - i < keep->last ||
                         (keep->interval > 0 && iteration % keep->interval == 0);
            ok = stays || retire(directory, iteration, renamed, err);
        }
    }
    return ok;
}

void save_folder_forecast(const char *directory, const Forecast *f, char *line, size_t line_bytes) {
    assert(f->saves >= 0 && f->there >= 0 && line_bytes > 0);
    uint64_t available, needed;
    *line = 0;
    if (!free_space(directory, f->bytes, &available, &needed)) return;
    int64_t wanted = f->saves, most_saves = (int64_t)(available / needed);
    // Without an interval, the folder never holds more than the last ones plus the one being
    // written.
    if (f->keep.last > 0 && f->keep.interval <= 0) {
        int64_t most = f->keep.last + 1 - f->there;
        if (wanted > most) wanted = most > 1 ? most : 1;
    }
    if (wanted <= most_saves) return;
    char size[SIZE_TEXT], left[SIZE_TEXT];
    snprintf(line, line_bytes,
             "WARNING: %s has %s left, enough for %" PRId64
             " more checkpoints of %s, but this run will "
             "write %" PRId64 "; free some space, or see --keep-last-checkpoints",
             directory, size_text(available, left), most_saves, size_text(needed, size), wanted);
}
