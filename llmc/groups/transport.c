// Sockets: see transport.h.
#include "llmc/groups/transport.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

// The address that libzmq asks to check keys (ZAP, rfc.zeromq.org/spec/27).
#define ZAP_ADDRESS "inproc://zeromq.zap.01"
enum { ZAP_FRAMES = 7 };

bool transport_open(Transport *t, CheckKey check, void *context, Error *err) {
    *t = (Transport){.check = check, .context = context};
    if (!zmq_has("curve"))
        return system_error(err,
                            "this libzmq has no CURVE encryption; install one that was built with libsodium");
    t->zmq = zmq_ctx_new();
    if (!t->zmq)
        return system_error(err, "cannot start ZeroMQ: %s; close other programs", zmq_strerror(errno));
    if (!check) return true;
    t->zap = zmq_socket(t->zmq, ZMQ_REP);
    int linger = 0;
    if (t->zap && zmq_setsockopt(t->zap, ZMQ_LINGER, &linger, sizeof linger) == 0 &&
        zmq_bind(t->zap, ZAP_ADDRESS) == 0) {
        return true;
    }
    system_error(err, "cannot check keys: %s; close other programs", zmq_strerror(errno));
    transport_close(t);
    return false;
}

void transport_close(Transport *t) {
    if (t->zap) zmq_close(t->zap);
    if (t->zmq) zmq_ctx_term(t->zmq);
    *t = (Transport){0};
}

// Receives the frames of a request into text; returns their number, 0 if there is no request.
static int receive_request(void *zap, char frames[ZAP_FRAMES][ADDRESS_BYTES], int lengths[ZAP_FRAMES]) {
    int count = 0, more = 1;
    size_t bytes = sizeof more;
    while (more) {
        char rest[ADDRESS_BYTES];
        char *to = count < ZAP_FRAMES ? frames[count] : rest;
        int length = zmq_recv(zap, to, ADDRESS_BYTES - 1, ZMQ_DONTWAIT);
        if (length < 0) return 0;
        if (length > ADDRESS_BYTES - 1) length = ADDRESS_BYTES - 1;
        to[length] = '\0';
        if (count < ZAP_FRAMES) lengths[count] = length;
        count++;
        zmq_getsockopt(zap, ZMQ_RCVMORE, &more, &bytes);
    }
    return count;
}

void transport_answer_checks(Transport *t) {
    char frames[ZAP_FRAMES][ADDRESS_BYTES];
    int lengths[ZAP_FRAMES], count;
    while ((count = receive_request(t->zap, frames, lengths)) > 0) {
        char name[NAME_BYTES] = "";
        // version, request, domain, address, identity, mechanism, key
        bool good = count == ZAP_FRAMES && strcmp(frames[5], "CURVE") == 0 && lengths[6] == KEY_RAW &&
                    t->check(t->context, (const uint8_t *)frames[6], frames[3], name);
        zmq_send(t->zap, "1.0", 3, ZMQ_SNDMORE);
        zmq_send(t->zap, frames[1], (size_t)lengths[1], ZMQ_SNDMORE);
        zmq_send(t->zap, good ? "200" : "400", 3, ZMQ_SNDMORE);
        zmq_send(t->zap, good ? "OK" : "unknown key", good ? 2 : 11, ZMQ_SNDMORE);
        zmq_send(t->zap, name, strlen(name), ZMQ_SNDMORE);
        zmq_send(t->zap, "", 0, 0);
    }
}

// ---- sockets ----

static bool set_number(void *socket, int option, int value) {
    return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

static bool set_common(void *socket, const Keys *keys, int pending) {
    int64_t most = FRAME_BYTES;
    return zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof most) == 0 &&
           set_number(socket, ZMQ_LINGER, 500) && set_number(socket, ZMQ_SNDHWM, pending) &&
           set_number(socket, ZMQ_RCVHWM, pending) && set_number(socket, ZMQ_HANDSHAKE_IVL, 10000) &&
           // Pings detect a peer that is frozen or unreachable.
           set_number(socket, ZMQ_HEARTBEAT_IVL, 2000) && set_number(socket, ZMQ_HEARTBEAT_TIMEOUT, 10000) &&
           set_number(socket, ZMQ_IPV6, 1) &&
           zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys->secret_key, KEY_TEXT) == 0;
}

// libzmq takes larger ports modulo 65536, and chooses one for 0.
static bool has_port(const char *address) {
    const char *port = strrchr(address, ':');
    long number = port ? strtol(port + 1, NULL, 10) : 0;
    return number >= 1 && number <= 65535;
}

void *transport_listen(Transport *t, const Keys *keys, const char *address, int pending, Error *err) {
    void *socket = zmq_socket(t->zmq, ZMQ_ROUTER);
    bool good = socket && set_common(socket, keys, pending) && set_number(socket, ZMQ_CURVE_SERVER, 1) &&
                zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, "groups", 6) == 0 &&
                set_number(socket, ZMQ_ROUTER_MANDATORY, 1);
    if (good && !has_port(address)) {
        errno = EINVAL;
        good = false;
    }
    if (good && zmq_bind(socket, address) == 0) return socket;
    int reason = errno;
    transport_close_socket(socket);
    error_set(err, reason == EINVAL || reason == EPROTONOSUPPORT ? EXIT_USAGE : EXIT_ENVIRONMENT,
              "cannot listen at %.200s: %s; give a free tcp://address:port of this machine", address,
              zmq_strerror(reason));
    return NULL;
}

void *transport_connect(Transport *t, const Keys *keys, const char *server_key, const char *address,
                        int pending, Error *err) {
    void *socket = zmq_socket(t->zmq, ZMQ_DEALER);
    bool good = socket && set_common(socket, keys, pending) && set_number(socket, ZMQ_IMMEDIATE, 1) &&
                zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, keys->public_key, KEY_TEXT) == 0 &&
                zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, server_key, KEY_TEXT) == 0 &&
                set_number(socket, ZMQ_RECONNECT_IVL, 100) &&
                set_number(socket, ZMQ_RECONNECT_IVL_MAX, 300) &&
                set_number(socket, ZMQ_CONNECT_TIMEOUT, 5000);
    if (good && zmq_connect(socket, address) == 0) return socket;
    int reason = errno;
    transport_close_socket(socket);
    usage_error(err, "cannot connect to %.200s: %s; give tcp://host:port", address, zmq_strerror(reason));
    return NULL;
}

void transport_reconnect(void *socket, const char *address) {
    zmq_disconnect(socket, address);  // fails if libzmq has given up
    zmq_connect(socket, address);
}

void transport_close_socket(void *socket) {
    if (socket) zmq_close(socket);
}

// ---- events ----

void *transport_monitor(Transport *t, void *socket, const char *name) {
    char address[64];
    int linger = 0;
    snprintf(address, sizeof address, "inproc://monitor-%s", name);
    if (zmq_socket_monitor(socket, address, ZMQ_EVENT_ALL) != 0) return NULL;
    void *monitor = zmq_socket(t->zmq, ZMQ_PAIR);
    if (!monitor) return NULL;
    zmq_setsockopt(monitor, ZMQ_LINGER, &linger, sizeof linger);
    if (zmq_connect(monitor, address) == 0) return monitor;
    zmq_close(monitor);
    return NULL;
}

int transport_events(void *monitor, char address[ADDRESS_BYTES]) {
    int found = 0;
    uint8_t event[6];
    char text[ADDRESS_BYTES];
    while (zmq_recv(monitor, event, sizeof event, ZMQ_DONTWAIT) >= 2) {
        uint16_t kind;
        memcpy(&kind, event, 2);
        int length = zmq_recv(monitor, text, sizeof text - 1, 0);
        text[length < 0 ? 0 : length > ADDRESS_BYTES - 1 ? ADDRESS_BYTES - 1 : length] = '\0';
        int bit = kind == ZMQ_EVENT_CONNECTED                    ? EVENT_CONNECTED
                  : kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED        ? EVENT_READY
                  : kind == ZMQ_EVENT_DISCONNECTED               ? EVENT_LOST
                  : kind == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH      ? EVENT_REFUSED
                  : kind == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL  ? EVENT_BROKEN
                  : kind == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL ? EVENT_BROKEN
                                                                 : 0;
        if (bit && address) memcpy(address, text, sizeof text);
        found |= bit;
    }
    return found;
}

// ---- messages ----

int64_t transport_receive(void *socket, uint8_t *frame, Route *route, char name[NAME_BYTES],
                          char address[ADDRESS_BYTES]) {
    zmq_msg_t message;
    if (route) {
        int length = zmq_recv(socket, route->id, sizeof route->id, ZMQ_DONTWAIT);
        if (length < 0) return -1;
        route->bytes = length > (int)sizeof route->id ? 0 : (size_t)length;
    }
    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&message);
        return -1;
    }
    size_t bytes = zmq_msg_size(&message);
    if (bytes > FRAME_BYTES) bytes = FRAME_BYTES;  // not reached: ZMQ_MAXMSGSIZE
    memcpy(frame, zmq_msg_data(&message), bytes);
    if (name) {
        const char *user = zmq_msg_gets(&message, "User-Id");
        memset(name, 0, NAME_BYTES);
        if (user && name_valid(user)) message_name(name, user);
    }
    if (address) {
        const char *from = zmq_msg_gets(&message, "Peer-Address");
        snprintf(address, ADDRESS_BYTES, "%s", from ? from : "");
    }
    bool more = zmq_msg_more(&message);
    zmq_msg_close(&message);
    while (more) {  // frames are single messages: further parts make it malformed
        bytes = 0;
        zmq_msg_init(&message);
        if (zmq_msg_recv(&message, socket, ZMQ_DONTWAIT) < 0) more = false;
        else more = zmq_msg_more(&message);
        zmq_msg_close(&message);
    }
    return (int64_t)bytes;
}

int transport_send(void *socket, const Route *route, const uint8_t *frame, size_t bytes) {
    if (route && zmq_send(socket, route->id, route->bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) return errno;
    return zmq_send(socket, frame, bytes, ZMQ_DONTWAIT) < 0 ? errno : 0;
}
