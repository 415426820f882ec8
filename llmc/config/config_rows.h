// Macros for the rows of the option table, for config_table.c only. They check at compile time that
// a row's kind matches the type of its field.
#pragma once
#include <stddef.h>

#include "llmc/config/config.h"
#include "sdp4bit/codec.h"

// Offset of a field. Doesn't compile if the field's type doesn't match the row's kind.
#define AT(type, field) \
    (offsetof(Config, field) + 0 * sizeof(char[_Generic(&((Config *)0)->field, type * : 1)]))

#define HEADING(text) \
    { .help = text }
#define USED(flag, role, type, of_kind, field, first, ...) \
    { .name = flag, .roles = role, .kind = of_kind, .offset = AT(type, field), .initial = first, __VA_ARGS__ }
#define FLAG(flag, role, field, text) USED(flag, role, bool, OPTION_FLAG, field, "false", .help = text)
#define NO_FLAG(flag, role, field, text) \
    USED(flag, role, bool, OPTION_FLAG, field, "true", .negative = true, .help = text)
#define INT(flag, role, field, first, least, most, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = least, .high = most, .value = "N", .help = text)
#define COUNT_TO(flag, role, field, first, least, most, text) \
    USED(flag, role, int64_t, OPTION_INT64, field, first, .low = least, .high = most, .value = "N", \
         .help = text)
#define COUNT(flag, role, field, first, least, text) COUNT_TO(flag, role, field, first, least, 1e15, text)
#define BITS(flag, role, field, first, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = 2, .high = 8, .choices = CODEC_BITS_CHOICES, \
         .value = "N", .help = text)
// A uniform codec, or 16 for unquantized activations.
#define ACTIVATION_BITS(flag, field, text) \
    USED(flag, FREE, int, OPTION_INT, field, "8", .low = 4, .high = 16, .choices = "4|8|16", .value = "N", \
         .help = text)
// Multiples of the Hadamard block size.
#define GROUP(flag, role, field, first, most, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = 32, .high = most, .multiple = 32, .value = "N", \
         .help = text)
#define REAL(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .value = "X", \
         .help = text)
// Used in float32, so its range is checked in float32.
#define SINGLE(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .single = true, \
         .value = "X", .help = text)
#define TEXT(flag, role, field, first, called, text) \
    USED(flag, role, const char *, OPTION_TEXT, field, first, .low = 1, .value = called, .help = text)
#define WORDS(flag, role, field, least, called, text) \
    USED(flag, role, Words, OPTION_WORDS, field, NULL, .low = least, .value = called, .help = text)
#define CHOICE(flag, role, type, field, first, words, text) \
    USED(flag, role, type, OPTION_CHOICE, field, first, .choices = words, .value = "WORD", .help = text)

// Accepted and checked, but ignored. The text says why.
#define IDLE(flag, of_kind, why, ...) \
    { \
        .name = flag, .kind = of_kind, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD, .help = why, \
        .no_other = why, __VA_ARGS__ \
    }
#define IDLE_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .value = NULL)
// Several flags with the same reason. others: separated by spaces.
#define IDLE_FLAGS(flag, others, why) IDLE(flag, OPTION_FLAG, why, .alias = others)
#define IDLE_REAL(flag, least, most, why) \
    IDLE(flag, OPTION_REAL, why, .low = least, .high = most, .value = "X")
#define IDLE_INT(flag, least, most, why) \
    IDLE(flag, OPTION_INT64, why, .low = least, .high = most, .value = "N")
#define IDLE_CHOICE(flag, words, why) IDLE(flag, OPTION_CHOICE, why, .choices = words, .value = "WORD")
// The same, but stored for the argument dump.
#define IDLE_STORED(flag, field, why) \
    USED(flag, FREE, bool, OPTION_FLAG, field, "false", .use = OPTION_NO_EFFECT, .help = why)
#define IDLE_TEXT(flag, field, called, why) \
    USED(flag, FREE, const char *, OPTION_TEXT, field, NULL, .use = OPTION_NO_EFFECT, .value = called, \
         .help = why)
// The same, but prints a note if the flag is given.
#define NOTED_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .note = true)
#define NOTED(flag, of_kind, least, most, words, called, why) \
    IDLE(flag, of_kind, why, .low = least, .high = most, .choices = words, .note = true, .value = called)
#define REFUSED(flag, why) \
    { .name = flag, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .help = why }
// Computed by config_finish.
#define DERIVED(key, role, type, of_kind, field) USED(key, role, type, of_kind, field, "0", .help = "")
