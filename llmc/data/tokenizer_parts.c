// Reads the normalizer, pre_tokenizer, post_processor and decoder of a tokenizer.json. See
// tokenizer_parser.h.
#include "llmc/data/tokenizer_parser.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

enum { MAX_NESTING = 8 };

typedef TokenizerParser Parser;

const char *tokenizer_part_type(const cJSON *part) {
    const char *type = json_member_string(part, "type");
    return type ? type : "without a type";
}

static bool is_type(const cJSON *item, const char *type) { return !strcmp(tokenizer_part_type(item), type); }

bool json_absent(const cJSON *item) { return !item || cJSON_IsNull(item); }

bool json_flag(const cJSON *object, const char *name, bool missing, bool *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    *value = json_absent(item) ? missing : cJSON_IsTrue(item);
    return json_absent(item) || cJSON_IsBool(item);
}

// Calls `read` for a part of the tokenizer, or for each part of a Sequence, which lists them in
// `members`.
typedef bool (*ReadPart)(Parser *r, const cJSON *part);

static bool each_part(Parser *r, const cJSON *part, const char *members, ReadPart read, int depth) {
    if (json_absent(part)) return true;
    if (!is_type(part, "Sequence")) return read(r, part);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(part, members), *item;
    if (!cJSON_IsArray(list) || depth == MAX_NESTING)
        return REFUSE("%s: a Sequence has no \"%s\"", r->path, members);
    cJSON_ArrayForEach(item, list) {
        if (!each_part(r, item, members, read, depth + 1)) return false;
    }
    return true;
}

static bool add_normalizer(Parser *r, Normalizer *normalizer, NormalizerStep step) {
    bool room = normalizer->count < MOST_NORMALIZER_STEPS;
    if (room) normalizer->step[normalizer->count++] = step;
    if (room && normalizer_bounded(normalizer)) return true;
    return REFUSE(
        "%s: the normalizer or decoder has more than %d steps or makes texts more than %d times "
        "longer, which is not supported",
        r->path, MOST_NORMALIZER_STEPS, NORMALIZER_MOST_GROWTH);
}

// Replace of a normalizer or decoder.
static bool read_replace(Parser *r, const cJSON *part, Normalizer *normalizer) {
    const char *from = json_member_string(cJSON_GetObjectItemCaseSensitive(part, "pattern"), "String");
    const char *to = json_member_string(part, "content");
    if (!from || !*from || !to)
        return REFUSE("%s: Replace is only supported with a \"pattern\" of a \"String\" and a \"content\"",
                      r->path);
    if (normalizer->count == MOST_NORMALIZER_STEPS) return add_normalizer(r, normalizer, (NormalizerStep){0});
    return add_normalizer(r, normalizer, (NormalizerStep){.from = xstrdup(from), .to = xstrdup(to)});
}

static bool read_normalizer(Parser *r, const cJSON *part) {
    Normalizer *normalizer = &r->out->normalizer;
    const char *prefix = json_member_string(part, "prepend");
    int count = normalizer->count;
    if (is_type(part, "Replace")) return read_replace(r, part, normalizer);
    if (is_type(part, "Prepend") && prefix && strlen(prefix) <= NORMALIZER_MOST_GROWTH)
        return add_normalizer(r, normalizer, (NormalizerStep){.to = xstrdup(prefix)});
    if (!is_type(part, "NFC"))
        return REFUSE("%s: the normalizer %.40s is not supported; only NFC, Prepend and Replace are", r->path,
                      tokenizer_part_type(part));
    if (count && normalizer->step[count - 1].nfc) return true;  // NFC is idempotent
    return add_normalizer(r, normalizer, (NormalizerStep){.nfc = nfc_create()});
}

static bool add_step(Parser *r, const char *regex, bool prefix_space) {
    PieceSteps *steps = &r->out->steps;
    if (steps->count == MOST_PIECE_STEPS)
        return REFUSE("%s: the pre_tokenizer has more than %d steps", r->path, MOST_PIECE_STEPS);
    PiecePattern *pattern = regex ? piece_pattern_compile(regex, r->path, r->err) : NULL;
    if (regex && !pattern) return false;
    steps->step[steps->count++] = (PieceStep){prefix_space, pattern};
    return true;
}

// Reads {"Regex": ...}, or {"String": ...} as literal text.
static bool read_split(Parser *r, const cJSON *part) {
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(part, "pattern");
    const char *regex = json_member_string(pattern, "Regex"), *text = json_member_string(pattern, "String");
    const char *behavior = json_member_string(part, "behavior");
    bool invert;
    if (!behavior || strcmp(behavior, "Isolated") != 0 || !json_flag(part, "invert", false, &invert) ||
        invert)
        return REFUSE("%s: Split with \"behavior\" other than Isolated, or \"invert\", is not supported",
                      r->path);
    if (regex) return add_step(r, regex, false);
    if (!text || !*text) return REFUSE("%s: Split has no pattern", r->path);
    char *quoted = xmalloc(2 * strlen(text) + 1, "a pattern"), *out = quoted;
    for (; *text; *out++ = *text++) {
        if (strchr("\\^$.[|()?*+{}", *text)) *out++ = '\\';
    }
    *out = 0;
    bool good = add_step(r, quoted, false);
    free(quoted);
    return good;
}

static bool read_metaspace(Parser *r, const cJSON *part) {
    static const char *const schemes[] = {"never", "first", "always"};
    Metaspace *metaspace = &r->out->metaspace;
    const char *space = json_member_string(part, "replacement"),
               *scheme = json_member_string(part, "prepend_scheme");
    uint32_t c;
    size_t bytes = space ? strlen(space) : 0;
    bool prefix, known = false;
    if (!bytes || bytes > NORMALIZER_MOST_GROWTH || utf8_next(space, bytes, &c) != bytes)
        return REFUSE("%s: Metaspace needs a \"replacement\" of one character of at most %d bytes", r->path,
                      NORMALIZER_MOST_GROWTH);
    if (metaspace->replace || r->out->steps.count)
        return REFUSE("%s: Metaspace is only supported as the only pre_tokenizer", r->path);
    for (int i = 0; i <= PREPEND_ALWAYS; i++) {
        if (strcmp(scheme ? scheme : "always", schemes[i]) != 0) continue;
        metaspace->prepend = (PrependScheme)i;
        known = true;
    }
    if (!known || !json_flag(part, "add_prefix_space", true, &prefix) ||
        !json_flag(part, "split", true, &metaspace->split) || (!prefix && metaspace->prepend))
        return REFUSE(
            "%s: Metaspace has an unknown \"prepend_scheme\" or \"split\", or \"add_prefix_space\" "
            "contradicts them",
            r->path);
    strcpy(metaspace->space, space);
    metaspace->replace = true;
    return true;
}

// A step after ByteLevel would see the byte alphabet instead of text.
static bool read_pre_tokenizer(Parser *r, const cJSON *part) {
    bool prefix, regex, single;
    if (r->out->steps.count && !r->out->steps.step[r->out->steps.count - 1].pattern)
        return REFUSE("%s: the pre_tokenizer has steps after ByteLevel, which is not supported", r->path);
    if (is_type(part, "Metaspace")) return read_metaspace(r, part);
    if (r->out->metaspace.replace)
        return REFUSE("%s: Metaspace is only supported as the only pre_tokenizer", r->path);
    if (is_type(part, "Split")) return read_split(r, part);
    if (is_type(part, "Digits") && json_flag(part, "individual_digits", false, &single))
        return add_step(r, single ? "\\p{N}" : "\\p{N}+", false);
    if (is_type(part, "ByteLevel") && json_flag(part, "add_prefix_space", true, &prefix) &&
        json_flag(part, "use_regex", true, &regex)) {
        // the last step has no pattern, which marks the end
        return (!regex || add_step(r, GPT2_PATTERN, prefix)) && add_step(r, NULL, prefix && !regex);
    }
    return REFUSE(
        "%s: the pre_tokenizer %.40s is not supported; only ByteLevel, Split, Digits and "
        "Metaspace are",
        r->path, tokenizer_part_type(part));
}

// Appends the ids of one token of a template.
static bool append_template_ids(Parser *r, const cJSON *template, const char *name, int *side) {
    const cJSON *tokens = cJSON_GetObjectItemCaseSensitive(template, "special_tokens"), *item;
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(tokens, name),
                                                        "ids");
    AroundText *around = &r->out->around;
    int64_t id;
    if (!cJSON_IsArray(ids))
        return REFUSE("%s: the post_processor does not define the ids of \"%.80s\"", r->path, name);
    cJSON_ArrayForEach(item, ids) {
        if (around->before + around->after == MOST_AROUND || !json_int64(item, 0, r->size - 1, &id))
            return REFUSE("%s: the post_processor has unknown or too many ids for \"%.80s\"", r->path, name);
        around->id[around->before + around->after] = (int32_t)id;
        ++*side;
    }
    return true;
}

static bool read_template(Parser *r, const cJSON *template) {
    const cJSON *single = cJSON_GetObjectItemCaseSensitive(template, "single"), *item;
    AroundText *around = &r->out->around;
    int texts = 0;
    if (around->before + around->after) return REFUSE("%s: the post_processor has two templates", r->path);
    cJSON_ArrayForEach(item, single) {
        const cJSON *token = cJSON_GetObjectItemCaseSensitive(item, "SpecialToken");
        const char *name = token ? json_member_string(token, "id") : NULL;
        texts += cJSON_GetObjectItemCaseSensitive(item, "Sequence") != NULL;
        if (token &&
            (!name || !append_template_ids(r, template, name, texts ? &around->after : &around->before)))
            return name ? false : REFUSE("%s: a token of the post_processor has no \"id\"", r->path);
    }
    return texts == 1 ||
           REFUSE("%s: the post_processor's template does not contain exactly one text", r->path);
}

static bool read_post_processor(Parser *r, const cJSON *part) {
    if (is_type(part, "ByteLevel")) return true;  // affects offsets only, not ids
    if (is_type(part, "TemplateProcessing")) return read_template(r, part);
    return REFUSE("%s: the post_processor %.40s is not supported; only TemplateProcessing is", r->path,
                  tokenizer_part_type(part));
}

// Removes spaces at the start of the decoded text.
static bool read_strip(Parser *r, const cJSON *part) {
    const char *content = json_member_string(part, "content");
    int64_t start, stop;
    if (!content || strcmp(content, " ") != 0 || !json_member_int64(part, "start", 0, 100, &start) ||
        !json_member_int64(part, "stop", 0, 0, &stop) || !r->fused || r->out->stripped)
        return REFUSE("%s: the decoder's Strip is only supported once, after Fuse, for spaces at the start",
                      r->path);
    r->out->stripped = (int)start;
    return true;
}

// The decoder of a BPE of characters: Replace, ByteFallback, Fuse and Strip, in this order.
static bool read_character_decoder(Parser *r, const cJSON *part) {
    const char *type = tokenizer_part_type(part);
    if (is_type(part, "Replace") && !r->decode_bytes && !r->fused) return read_replace(r, part, &r->spelling);
    if (is_type(part, "Strip")) return read_strip(r, part);
    bool bytes = is_type(part, "ByteFallback") && !r->fused, fuse = is_type(part, "Fuse");
    if (!bytes && !fuse)
        return REFUSE(
            "%s: the decoder %.40s is not supported here; only Replace, ByteFallback, Fuse and "
            "Strip in this order are",
            r->path, type);
    r->decode_bytes = r->decode_bytes || bytes;
    r->fused = r->fused || fuse;
    return true;
}

static bool read_decoder(Parser *r, const cJSON *part) {
    if (!r->out->steps.count) return read_character_decoder(r, part);
    return is_type(part, "ByteLevel") || REFUSE("%s: the decoder %.40s is not supported; only ByteLevel is",
                                                r->path, tokenizer_part_type(part));
}

// The steps of a byte-level BPE end in ByteLevel.
static bool check_steps(Parser *r) {
    PieceSteps *steps = &r->out->steps;
    if (!steps->count) {
        // cppcheck-suppress bufferAccessOutOfBounds ; counts the escape sequence, not its 3 bytes
        if (!r->out->metaspace.replace) memcpy(r->out->metaspace.space, LOWER_BLOCK, sizeof LOWER_BLOCK);
        return !r->out->metaspace.replace || !r->out->normalizer.count ||
               REFUSE("%s: Metaspace with a normalizer is not supported", r->path);
    }
    if (steps->step[steps->count - 1].pattern)
        return REFUSE("%s: the pre_tokenizer does not end in ByteLevel; add it, or remove the other steps",
                      r->path);
    if (!steps->step[steps->count - 1].prefix_space && steps->count > 1) steps->count--;  // it is a no-op
    return true;
}

// A BPE of characters needs byte_fallback, without which it loses text. A byte-level BPE has none.
static bool check_kind(Parser *r) {
    bool byte_fallback;
    r->characters = !r->out->steps.count;
    if (!json_flag(r->model, "byte_fallback", false, &byte_fallback))
        return REFUSE("%s: \"byte_fallback\" is not true or false", r->path);
    if (!r->characters && byte_fallback)
        return REFUSE("%s: the model's \"byte_fallback\" is not supported with ByteLevel", r->path);
    return !r->characters || byte_fallback ||
           REFUSE(
               "%s: the pre_tokenizer does not end in ByteLevel; only byte-level BPE and BPE with "
               "byte_fallback are supported",
               r->path);
}

static bool read_part(Parser *r, const char *name, const char *members, ReadPart read) {
    return each_part(r, cJSON_GetObjectItemCaseSensitive(r->root, name), members, read, 0);
}

bool tokenizer_parts_read(TokenizerParser *r) {
    if (!read_part(r, "normalizer", "normalizers", read_normalizer) ||
        !read_part(r, "pre_tokenizer", "pretokenizers", read_pre_tokenizer) || !check_steps(r) ||
        !check_kind(r) || !read_part(r, "decoder", "decoders", read_decoder))
        return false;
    bool missing = json_absent(cJSON_GetObjectItemCaseSensitive(r->root, "decoder"));
    return r->out->steps.count || !missing ||
           REFUSE("%s has no decoder; add the one of the model's tokenizer.json", r->path);
}

bool tokenizer_post_processor_read(TokenizerParser *r) {
    return read_part(r, "post_processor", "processors", read_post_processor);
}
