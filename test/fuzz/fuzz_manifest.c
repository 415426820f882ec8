// manifest.json of a checkpoint. Its last line is a hash of the text before it, which mutated
// inputs do not match. So the target parses the input both unchanged and with a correct last line.
#include <inttypes.h>
#include <xxhash.h>

#include "llmc/checkpoint/manifest.h"
#include "test/fuzz/fuzz.h"

static bool plain(const char *name) { return *name && *name != '.' && !strchr(name, '/'); }

static void use(const Manifest *m) {
    Error err = {0};
    for (int i = 0; i < m->file_count; i++) {
        const ManifestFile *f = &m->files[i];
        PROMISE(plain(f->folder) && plain(f->name) && f->first >= 0 && f->count >= 0 &&
                f->first + f->count <= m->slice_count);
    }
    for (int i = 0; i < m->slice_count; i++) {
        const ManifestSlice *s = &m->slices[m->order[i]];
        PROMISE(s->file >= 0 && s->file < m->file_count && s->tensor >= 0 && s->tensor < m->tensor_count &&
                s->kind < SLICE_KINDS && s->node >= 0 && s->node < m->nodes[s->kind]);
        PROMISE(s->node == 0 || slice_kind_per_node(s->kind));
        const Tensor *t = &m->tensors[s->tensor];
        PROMISE(slice_fits(t, s->block, s->lo, s->hi) && s->lo < s->hi);
        PROMISE(s->begin + (uint64_t)(s->hi - s->lo) * 2 <= m->files[s->file].bytes);
        int64_t row = s->lo / s->block.count, column = s->block.first + s->lo % s->block.count;
        PROMISE(manifest_first_slice(m, s->tensor, s->kind, s->node, row, column) == i);
        free(slice_name(t, s->kind, s->lo, s->block, s->node));
    }
    for (int i = 0; i < m->tensor_count; i++) PROMISE(manifest_find_tensor(m, m->tensors[i].name) == i);
    PROMISE(m->state.iteration >= 0 && m->arguments && *m->arguments == '{');
    if (!manifest_check_complete(m, "manifest.json", &err)) fuzz_check_error(&err);
}

static void try_text(const char *text, size_t bytes) {
    Manifest manifest;
    Error err = {0};
    if (manifest_parse(&manifest, text, bytes, "manifest.json", &err)) {
        use(&manifest);
        manifest_free(&manifest);
    } else {
        fuzz_check_error(&err);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { TAIL = 29 };
    char *text = (char *)fuzz_copy(data, size), tail[TAIL + 1];
    try_text(text, size);
    snprintf(tail, sizeof tail, "\"xxh3\": \"%016" PRIx64 "\"\n}\n", XXH3_64bits(data, size));
    text = (char *)xrealloc(text, size + TAIL, "a manifest");
    memcpy(text + size, tail, TAIL);
    try_text(text, size + TAIL);
    free(text);
    return 0;
}
