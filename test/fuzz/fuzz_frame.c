// Frames between replica groups and the rendezvous. Inputs are parsed as they are, and again with a
// valid magic, length and hash, so that the search reaches the body.
#include "llmc/groups/frame.h"
#include "test/fuzz/fuzz.h"

static void parse(const uint8_t *data, size_t size) {
    static Message message, again;
    static uint8_t frame[FRAME_BYTES];
    const char *why = NULL;
    uint8_t *copy = (uint8_t *)fuzz_copy(data, size);
    bool good = frame_read(copy, size, &message, &why);
    PROMISE(good == !why);
    PROMISE(good ? message.kind >= 1 && message.kind < MESSAGE_KINDS : message.kind == MESSAGE_KINDS);
    if (good) {
        PROMISE(message.chunk >= 0 && message.chunk < MAX_CHUNKS && message.round >= 0 && message.bytes >= 0);
        PROMISE(message.offers >= 0 && message.offers <= MAX_GROUPS && message.data_bytes <= PIECE_BYTES);
        PROMISE(memchr(message.text, 0, sizeof message.text) && memchr(message.address, 0, ADDRESS_BYTES));
        for (int i = 0; i < message.offers; i++) PROMISE(name_valid(message.offer[i].name));
        // A message survives a round trip.
        size_t bytes = frame_write(&message, frame);
        PROMISE(bytes == size && frame_read(frame, bytes, &again, &why));
        PROMISE(again.kind == message.kind && again.rate == message.rate && again.offers == message.offers);
        PROMISE(strcmp(again.text, message.text) == 0 && strcmp(again.from, message.from) == 0);
        PROMISE(memcmp(again.offer, message.offer, (size_t)message.offers * sizeof(Offer)) == 0);
        PROMISE(again.data_bytes == message.data_bytes);
        PROMISE(!message.data_bytes || memcmp(again.data, message.data, message.data_bytes) == 0);
    }
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    parse(data, size);
    if (size < FRAME_HEADER_BYTES || size > FRAME_BYTES) return 0;
    uint8_t *sealed = (uint8_t *)fuzz_copy(data, size);
    memcpy(sealed, "SDPG\1\0", 6);  // magic and version
    frame_seal(sealed, size);
    parse(sealed, size);
    free(sealed);
    return 0;
}
