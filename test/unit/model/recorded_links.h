// Links between pipeline stages (llmc/comm.h) that only record which memory they send and receive.
// As in llmc/cuda/comm.cu, a link has its own stream, and events order it with the caller's stream.
// The other end is not recorded, so a message is only known to be sent after link_sent. Included by
// recorded_run.h.
#pragma once
#include "llmc/model/pipeline_schedule.h"
#include "test/unit/state/recording.h"

enum { MOST_PENDING = 64 };
struct Link {
    Stream *stream;
    Event *ready;             // end of the work that the caller has queued
    Event *done;              // end of the message for which the caller waits
    Clock end[MOST_PENDING];  // ends of the pending messages, oldest first
    int pending;
};

Link *link_open(const Group *group, int from, int to, Device *device, const char *name) {
    if (group->rank != from && group->rank != to) return NULL;
    Link *link = (Link *)xcalloc(1, sizeof *link, "a link");
    link->stream = stream_create(device, name);
    link->ready = event_create(device);
    link->done = event_create(device);
    return link;
}

// Records a message and the time at which it ends.
static void transfer(Link *link, const char *name, Access access, const void *memory, size_t bytes,
                     Stream *caller) {
    Device *device = caller->device;
    if (link->pending == MOST_PENDING)
        fail_msg("%s: more than %d messages", link->stream->name, MOST_PENDING);
    event_record(link->ready, caller);
    stream_wait(link->stream, link->ready);
    begin(device, link->stream->id, name);
    use(device, access, memory, (int64_t)bytes);
    link->end[link->pending++] = device->stream_clock[link->stream->id];
}
void link_send(Link *link, const void *memory, size_t bytes, Stream *stream) {
    transfer(link, "send", READ, memory, bytes, stream);
}
void link_expect(Link *link, void *memory, size_t bytes, Stream *stream) {
    transfer(link, "receive", WRITE, memory, bytes, stream);
}

// Makes the stream wait for the oldest `count` messages.
static void wait_for_messages(Link *link, int count, Stream *stream) {
    if (count <= 0) return;
    link->done->clock = link->end[count - 1];
    stream_wait(stream, link->done);
    link->pending -= count;
    memmove(link->end, link->end + count, (size_t)link->pending * sizeof(Clock));
}
void link_sent(Link *link, int pending, Stream *stream) {
    wait_for_messages(link, link->pending - pending, stream);
}
void link_arrived(Link *link, Stream *stream) { wait_for_messages(link, link->pending > 0, stream); }

// Lists the links of a stage. Returns their number.
enum { MOST_LINKS = 6 };
static int links_of(const Pipeline *p, Link *links[MOST_LINKS]) {
    Link *const all[MOST_LINKS] = {p->from_before, p->to_next,        p->from_next,
                                   p->to_before,   p->words_to_first, p->words_to_last};
    int count = 0;
    for (int i = 0; i < MOST_LINKS; i++) {
        if (all[i]) links[count++] = all[i];
    }
    return count;
}

// Waits for the pending messages, like comm_close.
static void close_links(const Pipeline *pipeline) {
    Link *links[MOST_LINKS];
    int count = links_of(pipeline, links);
    for (int i = 0; i < count; i++) {
        stream_synchronize(links[i]->stream);
        event_destroy(links[i]->ready);
        event_destroy(links[i]->done);
        stream_destroy(links[i]->stream);
        free(links[i]);
    }
}
