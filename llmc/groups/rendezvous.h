// The rendezvous: a server that keeps the membership and the rounds of a run (rounds.h) and relays
// payloads between groups without a direct link. It has no training state and may restart at any
// time.
#pragma once
#include "llmc/base/json_line.h"
#include "llmc/groups/frame.h"
LLMC_BEGIN

typedef struct RendezvousOptions {
    const char *listen;  // tcp://address:port; tcp://*:port for all addresses of the machine
    const char *keys;    // folder with server.secret and the groups' public keys
    // Prints one line of the log. Called from the server's thread. NULL: none.
    void (*log)(void *context, const char *line);
    void *context;
} RendezvousOptions;

typedef struct Rendezvous Rendezvous;

// Starts the server in a thread of its own. Returns NULL with err: the address is in use, keys are
// missing.
Rendezvous *rendezvous_serve_start(const RendezvousOptions *options, Error *err);
// Stops the server and frees it. No-op for NULL.
void rendezvous_serve_stop(Rendezvous *server);
// Asks the rendezvous at `address` for its status table and appends it to `table`. Uses the
// server's keys, or the only other pair in the folder. Error: EXIT_COMMUNICATION if it does not
// answer.
bool rendezvous_status(const char *address, const char *keys, Text *table, Error *err);

LLMC_END
