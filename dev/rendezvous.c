// rendezvous: the server at which replica groups find each other, its keys, and its status table.
//
//     rendezvous keygen FOLDER NAME...
//     rendezvous serve --listen tcp://*:29400 --keys FOLDER
//     rendezvous status tcp://host:29400 --keys FOLDER
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dev/lib/tool.h"
#include "llmc/base/version.h"
#include "llmc/groups/keys.h"
#include "llmc/groups/rendezvous.h"

typedef struct Settings {
    const char *listen, *keys;
    bool help, version;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {.help = "rendezvous"},
    {"listen", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(listen), .initial = "tcp://*:29400",
     .value = "ADDRESS", .help = "serve: tcp://address:port to listen at; * means all addresses."},
    {"keys", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(keys), .value = "FOLDER",
     .help = "serve: folder with server.secret, server.public and NAME.public of every group. Groups may be "
             "added while it runs. status: the same folder, or a group's."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
    {"version", .kind = OPTION_FLAG, .offset = FIELD(version), .help = "Print the version and exit."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

static const char usage[] =
    "Usage: rendezvous keygen FOLDER [NAME...]\n"
    "         makes FOLDER/server.secret and .public if they are missing, and the keys of the groups\n"
    "       rendezvous serve [--listen tcp://*:PORT] --keys FOLDER\n"
    "         serves a run until it receives SIGINT or SIGTERM; may be restarted at any time\n"
    "       rendezvous status tcp://HOST:PORT --keys FOLDER\n"
    "         prints the groups, their progress and their last rounds\n";

static void print_line(void *context, const char *line) {
    char date[32];
    time_t now = time(NULL);
    struct tm local;
    strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", localtime_r(&now, &local));
    printf("[%s] %s\n", date, line);
    fflush(stdout);
}

static bool serve(const Settings *s, Error *err) {
    sigset_t ends;
    int number;
    if (!s->keys)
        return usage_error(err, "serve needs --keys; make them with: rendezvous keygen FOLDER NAME...");
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
    signal(SIGPIPE, SIG_IGN);
    const RendezvousOptions options = {s->listen, s->keys, print_line, NULL};
    Rendezvous *server = rendezvous_serve_start(&options, err);
    if (!server) return false;
    char line[512];
    snprintf(line, sizeof line, "rendezvous listens at %s", s->listen);
    print_line(NULL, line);
    sigwait(&ends, &number);
    rendezvous_serve_stop(server);
    print_line(NULL, "rendezvous stopped; groups continue and wait for it");
    return true;
}

static bool keygen(char **names, int count, Error *err) {
    if (count < 1) return usage_error(err, "keygen needs a folder: rendezvous keygen FOLDER [NAME...]");
    const char *folder = names[0];
    if (!keys_exist(folder, SERVER_NAME) && !keys_generate(folder, SERVER_NAME, err)) return false;
    for (int i = 1; i < count; i++) {
        if (strcmp(names[i], SERVER_NAME) == 0) continue;
        if (!keys_generate(folder, names[i], err)) return false;
        printf("copy %s.secret, %s.public and server.public from %s to the site of group %s\n", names[i],
               names[i], folder, names[i]);
    }
    return true;
}

static bool status(const Settings *s, char **words, int count, Error *err) {
    Text text = {0};
    if (count != 1)
        return usage_error(err, "status needs one address: rendezvous status tcp://HOST:PORT --keys FOLDER");
    if (!s->keys) return usage_error(err, "status needs --keys: the folder of the rendezvous, or of a group");
    bool good = rendezvous_status(words[0], s->keys, &text, err);
    if (good) fputs(text.data, stdout);
    text_free(&text);
    return good;
}

// argv: the command and its words; the flags follow.
static bool run(const Settings *s, const char *command, char **words, int count, Error *err) {
    if (strcmp(command, "serve") == 0) {
        if (count) return usage_error(err, "unexpected word '%.100s'; serve has only flags", words[0]);
        return serve(s, err);
    }
    if (strcmp(command, "keygen") == 0) return keygen(words, count, err);
    return status(s, words, count, err);
}

typedef struct Command {
    Settings settings;
    const char *name;
    char **words;
    int count;
} Command;

static bool run_command(const void *settings, int *argc, char ***argv, Error *err) {
    const Command *c = (const Command *)settings;
    return run(&c->settings, c->name, c->words, c->count, err);
}

static void print_version(void) { printf("rendezvous %s (%s)\n", version_number(), version_commit()); }

int main(int argc, char **argv) {
    Command command = {.name = argc > 1 ? argv[1] : ""};
    const Tool tool = {table, TABLE_ROWS, usage, &command, run_command, print_version};
    bool known = strcmp(command.name, "serve") == 0 || strcmp(command.name, "keygen") == 0 ||
                 strcmp(command.name, "status") == 0;
    if (!known && *command.name != '-') {
        error_print(NULL, *command.name ? "unknown command; use keygen, serve or status, or --help"
                                        : "a command is missing; use keygen, serve or status, or --help");
        return EXIT_USAGE;
    }
    if (!known) return tool_main(&tool, argc, argv);
    int first = 2;  // the first flag after the command's words
    while (first < argc && *argv[first] != '-') first++;
    command.words = argv + 2;
    command.count = first - 2;
    char **flags = (char **)xcalloc((size_t)argc + 1, sizeof *flags, "flags");
    flags[0] = argv[0];
    for (int i = first; i < argc; i++) flags[i - first + 1] = argv[i];
    int code = tool_main(&tool, argc - first + 1, flags);
    free(flags);
    return code;
}
