// The pipeline's streams and events: see lanes.h.
#include "sdp4bit/lanes.h"

#include <assert.h>

void lanes_open(Lanes *lanes, Device *device, bool apart) {
    assert(lanes && device);
    Lanes fresh = {0};
    *lanes = fresh;
    lanes->apart = apart;
    lanes->last = apart ? stream_create_urgent(device, "sums and update")
                        : stream_create(device, "sums and update");
    lanes->first = apart ? stream_create_urgent(device, "quantization") : lanes->last;
    lanes->middle = apart ? stream_create_urgent(device, "requantization") : lanes->last;
    lanes->node = apart ? stream_create_urgent(device, "node hop") : lanes->last;
    lanes->rail = apart ? stream_create_urgent(device, "rail hop") : lanes->last;
    if (!apart) return;
    lanes->joint = event_create(device);
    for (int e = 0; e < LANE_EVENTS; e++) {
        for (int slot = 0; slot < LANE_SLOTS; slot++) lanes->event[e][slot] = event_create(device);
    }
}

void lanes_close(Lanes *lanes) {
    if (lanes->apart) {
        stream_destroy(lanes->first);
        stream_destroy(lanes->node);
        stream_destroy(lanes->middle);
        stream_destroy(lanes->rail);
        event_destroy(lanes->joint);
        for (int e = 0; e < LANE_EVENTS; e++) {
            for (int slot = 0; slot < LANE_SLOTS; slot++) event_destroy(lanes->event[e][slot]);
        }
    }
    if (lanes->last) stream_destroy(lanes->last);
    Lanes empty = {0};
    *lanes = empty;
}

void lanes_synchronize(const Lanes *lanes) {
    Stream *const all[] = {lanes->first, lanes->node, lanes->middle, lanes->rail, lanes->last};
    for (int i = lanes->apart ? 0 : 4; i < 5; i++) stream_synchronize(all[i]);
}

void lane_done(const Lanes *lanes, LaneEvent event, int slot, Stream *stream) {
    assert(event < LANE_EVENTS && slot >= 0 && slot < LANE_SLOTS);
    if (lanes->apart) event_record(lanes->event[event][slot], stream);
}

void lane_wait(const Lanes *lanes, LaneEvent event, int slot, Stream *stream) {
    assert(event < LANE_EVENTS && slot >= 0 && slot < LANE_SLOTS);
    if (lanes->apart) stream_wait(stream, lanes->event[event][slot]);
}

void lanes_after(const Lanes *lanes, Stream *after, Stream *before) {
    if (!lanes->apart) return;
    event_record(lanes->joint, before);
    stream_wait(after, lanes->joint);
}
