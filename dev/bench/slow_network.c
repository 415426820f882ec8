// Connects network namespaces of this machine by links with a delay and a limited rate, for
// dev/bench/elastic_trial.sh. The kernel's netem does the same, but many kernels are built without
// it. Needs root and /dev/net/tun.
//
//     slow_network DELAY_MS MBIT NAMESPACE...    e.g. 25 100 site-a site-b
//
// Creates a device `slow` in every namespace. The caller gives the namespace number i (from 1) the
// IPv4 address that ends with i, in one /24. A packet waits for the sender's rate, the delay and
// the receiver's rate, in this order. Queues hold half a second of packets, and drop the rest.
//
// Standard input has commands, one a line; NAMESPACE is a name:
//
//     cut NAMESPACE        drops all of its packets, in both directions
//     heal NAMESPACE       passes all packets again
//     outgoing NAMESPACE   drops TCP connections to it, as NAT does; it can connect to others
//
// Ends when standard input does.
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "llmc/base/base.h"

enum { MOST_PORTS = 32, PACKET_BYTES = 2048, QUEUE_PACKETS = 8192 };

typedef struct Packet {
    double due;
    int to, bytes;
    uint8_t data[PACKET_BYTES];
} Packet;

// A direction of a link: packets in the order of their due times.
typedef struct Queue {
    double free;  // time at which the link has sent everything
    int first, count;
    Packet *packet;  // (QUEUE_PACKETS) ring
} Queue;

typedef struct Port {
    const char *name;
    int device;
    bool cut, outgoing;
    Queue up, down;
} Port;

typedef struct Network {
    double delay, bytes_per_second;
    int ports;
    Port port[MOST_PORTS];
} Network;

// ---- devices ----

// Enters a namespace and creates its device. Devices keep the namespace of their file.
static int open_device(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) return -1;
    close(space);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(request.ifr_name, sizeof request.ifr_name, "slow");
    if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0) return -1;
    return device;
}

static bool open_port(Network *n, const char *name) {
    Port *port = &n->port[n->ports++];
    port->name = name;
    port->up.packet = (Packet *)xcalloc(QUEUE_PACKETS, sizeof(Packet), "a queue of packets");
    port->down.packet = (Packet *)xcalloc(QUEUE_PACKETS, sizeof(Packet), "a queue of packets");
    port->device = open_device(name);
    if (port->device >= 0) return true;
    fprintf(stderr, "error: cannot create a device in the network namespace %s: %s; run as root\n", name,
            strerror(errno));
    return false;
}

// ---- packets ----

static Packet *last_of(Queue *q) { return &q->packet[(q->first + q->count) % QUEUE_PACKETS]; }

// Appends a packet that reaches the link at `now`. Drops it if the queue is full.
static void append(const Network *n, Queue *q, const Packet *packet, double now, double delay) {
    double start = q->free > now ? q->free : now;
    if (q->count == QUEUE_PACKETS || start > now + 0.5) return;
    q->free = start + packet->bytes / n->bytes_per_second;
    Packet *p = last_of(q);
    memcpy(p->data, packet->data, (size_t)packet->bytes);
    p->bytes = packet->bytes;
    p->to = packet->to;
    p->due = q->free + delay;
    q->count++;
}

static Packet *due_packet(Queue *q, double now) {
    if (q->count == 0 || q->packet[q->first].due > now) return NULL;
    return &q->packet[q->first];
}

static void remove_first(Queue *q) {
    q->first = (q->first + 1) % QUEUE_PACKETS;
    q->count--;
}

// Returns true for the first packet of a TCP connection: SYN without ACK.
static bool opens_connection(const Packet *p) {
    int header = (p->data[0] & 15) * 4;
    return p->data[9] == 6 && p->bytes > header + 13 && (p->data[header + 13] & 0x12) == 0x02;
}

static void receive(Network *n, Port *port, double now) {
    Packet packet;
    for (;;) {
        ssize_t bytes = read(port->device, packet.data, PACKET_BYTES);
        if (bytes < 20) return;
        int to = packet.data[19] - 1;  // the last byte of the IPv4 address
        if (packet.data[0] >> 4 != 4 || to < 0 || to >= n->ports || port->cut || n->port[to].cut) continue;
        packet.bytes = (int)bytes;
        packet.to = to;
        if (n->port[to].outgoing && opens_connection(&packet)) continue;
        append(n, &port->up, &packet, now, n->delay);
    }
}

// Delivers the packets that are due. Returns the time until the next one, in seconds.
static double deliver(Network *n, double now) {
    double next = 1;
    for (int i = 0; i < n->ports; i++) {
        Queue *up = &n->port[i].up;
        for (Packet *p; (p = due_packet(up, now)); remove_first(up))
            if (!n->port[i].cut) append(n, &n->port[p->to].down, p, p->due, 0);
        if (up->count > 0 && up->packet[up->first].due - now < next) next = up->packet[up->first].due - now;
    }
    for (int i = 0; i < n->ports; i++) {
        Queue *down = &n->port[i].down;
        for (Packet *p; (p = due_packet(down, now)); remove_first(down)) {
            if (!n->port[i].cut && write(n->port[i].device, p->data, (size_t)p->bytes) < 0) continue;
        }
        if (down->count > 0 && down->packet[down->first].due - now < next)
            next = down->packet[down->first].due - now;
    }
    return next;
}

// ---- commands ----

static void obey(Network *n, char *line) {
    char *verb = strtok(line, " "), *name = strtok(NULL, " ");
    Port *port = NULL;
    for (int i = 0; name && i < n->ports; i++)
        if (strcmp(n->port[i].name, name) == 0) port = &n->port[i];
    bool cut = verb && strcmp(verb, "cut") == 0, heal = verb && strcmp(verb, "heal") == 0;
    bool outgoing = verb && strcmp(verb, "outgoing") == 0;
    if (!port || !(cut || heal || outgoing)) {
        fprintf(stderr, "error: unknown command or namespace; use cut, heal or outgoing and a name\n");
        return;
    }
    port->cut = cut;
    port->outgoing = outgoing;
}

// Returns false at the end of standard input.
static bool read_commands(Network *n) {
    char text[4096];
    ssize_t bytes = read(STDIN_FILENO, text, sizeof text - 1);
    if (bytes <= 0) return false;
    text[bytes] = 0;
    char *rest = text;
    for (char *line; (line = strsep(&rest, "\n"));)
        if (*line) obey(n, line);
    return true;
}

static void serve(Network *n) {
    struct pollfd files[MOST_PORTS + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    for (int i = 0; i < n->ports; i++) files[i + 1] = (struct pollfd){n->port[i].device, POLLIN, 0};
    for (;;) {
        double wait = deliver(n, monotonic_seconds());
        struct timespec timeout = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
        if (wait < 0) timeout = (struct timespec){0};
        if (ppoll(files, (nfds_t)n->ports + 1, &timeout, NULL) < 0 && errno != EINTR) return;
        double now = monotonic_seconds();
        for (int i = 0; i < n->ports; i++)
            if (files[i + 1].revents) receive(n, &n->port[i], now);
        if (files[0].revents && !read_commands(n)) return;
    }
}

int main(int argc, char **argv) {
    static Network network;
    if (argc < 4 || argc - 3 > MOST_PORTS || atof(argv[1]) < 0 || atof(argv[2]) <= 0) {
        fprintf(stderr, "error: usage: slow_network DELAY_MS MBIT NAMESPACE...\n");
        return EXIT_USAGE;
    }
    network.delay = atof(argv[1]) / 1e3;
    network.bytes_per_second = atof(argv[2]) * 1e6 / 8;
    for (int i = 3; i < argc; i++)
        if (!open_port(&network, argv[i])) return EXIT_ENVIRONMENT;
    printf("ready\n");
    fflush(stdout);
    serve(&network);
    for (int i = 0; i < network.ports; i++) {
        close(network.port[i].device);
        free(network.port[i].up.packet);
        free(network.port[i].down.packet);
    }
    return 0;
}
