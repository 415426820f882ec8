// TensorBoard event files: see tensorboard.h. A file is a sequence of TFRecords, each one Event
// message of TensorFlow's event.proto:
//   Event   { 1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary }
//   Summary { 1: Value { 1: string tag, 2: float simple_value | 8: TensorProto,
//                        9: SummaryMetadata } }
#include "llmc/log/tensorboard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/append.h"
#include "llmc/base/json_line.h"

struct Tensorboard {
    Append file;
};

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };  // protobuf wire types

static void put_little_endian(Text *b, uint64_t value, int bytes) {
    uint8_t out[8] = {0};
    for (int i = 0; i < bytes; i++) out[i] = (uint8_t)(value >> (8 * i));
    text_add_bytes(b, out, (size_t)bytes);
}

static void put_varint(Text *b, uint64_t value) {
    do {
        uint8_t byte = (uint8_t)((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
        text_add_bytes(b, &byte, 1);
        value >>= 7;
    } while (value);
}

static void put_key(Text *b, int field, int wire) { put_varint(b, (uint64_t)(field << 3 | wire)); }

static void put_string(Text *b, int field, const char *text) {
    put_key(b, field, WIRE_BYTES);
    put_varint(b, strlen(text));
    text_add_bytes(b, text, strlen(text));
}

// Appends a finished message as a field of `b` and frees it.
static void put_message(Text *b, int field, Text *message) {
    put_key(b, field, WIRE_BYTES);
    put_varint(b, message->length);
    text_add_bytes(b, message->data, message->length);
    text_free(message);
}

// Computes CRC-32C (Castagnoli), masked as in TFRecord. Bit by bit, because records are short.
static uint32_t masked_crc(const char *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= (uint8_t)data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

// Returns a TFRecord: u64 length, CRC of the length, payload, CRC of the payload. Frees the
// payload.
static Text frame(Text *payload) {
    Text record = {0};
    put_little_endian(&record, payload->length, 8);
    put_little_endian(&record, masked_crc(record.data, 8), 4);
    text_add_bytes(&record, payload->data, payload->length);
    put_little_endian(&record, masked_crc(payload->data, payload->length), 4);
    text_free(payload);
    return record;
}

static Text begin_event(double wall_time, int64_t step) {
    Text event = {0};
    uint64_t bits;
    memcpy(&bits, &wall_time, sizeof bits);
    put_key(&event, 1, WIRE_64);
    put_little_endian(&event, bits, 8);
    if (step) {  // protobuf omits zeros
        put_key(&event, 2, WIRE_VARINT);
        put_varint(&event, (uint64_t)step);
    }
    return event;
}

static Text version_record(double wall_time) {
    Text event = begin_event(wall_time, 0);
    put_string(&event, 3, "brain.Event:2");
    return frame(&event);
}

// Wraps a Value in a Summary and an Event. Frees the value.
static Text value_record(double wall_time, int64_t step, Text *value) {
    Text event = begin_event(wall_time, step), summary = {0};
    put_message(&summary, 1, value);
    put_message(&event, 5, &summary);
    return frame(&event);
}

static Text scalar_record(double wall_time, int64_t step, const char *tag, float number) {
    Text value = {0};
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_string(&value, 1, tag);
    put_key(&value, 2, WIRE_32);
    put_little_endian(&value, bits, 4);
    return value_record(wall_time, step, &value);
}

// Returns a record in the text plugin's format: a string tensor of shape (1), and metadata that
// names the plugin.
static Text text_record(double wall_time, int64_t step, const char *tag, const char *text) {
    Text value = {0}, dim = {0}, shape = {0}, tensor = {0}, plugin = {0}, metadata = {0};
    put_key(&dim, 1, WIRE_VARINT);  // TensorShapeProto.Dim { 1: size }
    put_varint(&dim, 1);
    put_message(&shape, 2, &dim);      // TensorShapeProto { 2: dim }
    put_key(&tensor, 1, WIRE_VARINT);  // TensorProto { 1: dtype, 2: tensor_shape, 8: string_val }
    put_varint(&tensor, 7);            // DT_STRING
    put_message(&tensor, 2, &shape);
    put_string(&tensor, 8, text);
    put_string(&plugin, 1, "text");  // SummaryMetadata { 1: plugin_data { 1: plugin_name } }
    put_message(&metadata, 1, &plugin);
    put_string(&value, 1, tag);
    put_message(&value, 8, &tensor);
    put_message(&value, 9, &metadata);
    return value_record(wall_time, step, &value);
}

size_t tensorboard_encode(uint8_t *out, size_t capacity, double wall_time, int64_t step, const char *tag,
                          float value) {
    Text record = tag ? scalar_record(wall_time, step, tag, value) : version_record(wall_time);
    size_t length = record.length;
    if (length <= capacity) memcpy(out, record.data, length);
    free(record.data);
    return length;
}

static void append_and_free(Tensorboard *tb, Text record) {
    append_record(&tb->file, record.data, record.length);
    free(record.data);
}

// Returns events.out.tfevents.<unix_s>.<host>.<pid>.<n> with the first free n. The caller frees it.
static char *event_path(const char *dir, int n) {
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    return text_format("%s/events.out.tfevents.%lld.%s.%ld.%d", dir, (long long)time(NULL), host,
                       (long)getpid(), n);
}

Tensorboard *tensorboard_open(const char *dir, Error *err) {
    if (!append_make_folders(dir, err)) return NULL;
    Tensorboard *tb = xcalloc(1, sizeof *tb, "TensorBoard writer");
    bool opened = false, taken = true;
    for (int n = 0; taken && n < 1000; n++) {
        char *path = event_path(dir, n);
        opened = append_open(&tb->file, path, O_EXCL, err);
        taken = !opened && errno == EEXIST;
        free(path);
    }
    if (!opened) {
        free(tb);
        return NULL;
    }
    append_and_free(tb, version_record(wall_seconds()));
    return tb;
}

void tensorboard_close(Tensorboard *tb) {
    if (!tb) return;
    append_close(&tb->file);
    free(tb);
}

void tensorboard_scalar(Tensorboard *tb, const char *tag, int64_t step, double value) {
    append_and_free(tb, scalar_record(wall_seconds(), step, tag, (float)value));
}

void tensorboard_text(Tensorboard *tb, const char *tag, int64_t step, const char *text) {
    append_and_free(tb, text_record(wall_seconds(), step, tag, text));
}
