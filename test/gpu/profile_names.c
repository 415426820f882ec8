// An NVTX tool (NVTX_INJECTION64_PATH). Writes the starts and ends of ranges and the names of
// streams to the file PROFILE_NAMES, as "start NAME", "end NAME" and "stream NAME". test/gpu.sh
// searches it for the trainer's phases.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <nvtx3/nvToolsExtCudaRt.h>

static void note(const char *what, const char *name) {
    const char *path = getenv("PROFILE_NAMES");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s %s\n", what, name);
    fclose(file);
}

// A range's id is the address of its name, which is valid as long as the program runs.
static nvtxRangeId_t NVTX_API started(const char *name) {
    note("start", name);
    return (nvtxRangeId_t)(uintptr_t)name;
}
static void NVTX_API ended(nvtxRangeId_t range) { note("end", (const char *)(uintptr_t)range); }
static void NVTX_API named(cudaStream_t stream, const char *name) { note("stream", name); }

static int take(const NvtxExportTableCallbacks *callbacks, NvtxCallbackModule module, unsigned at,
                NvtxFunctionPointer function) {
    NvtxFunctionTable table = NULL;
    unsigned size = 0;
    if (!callbacks->GetModuleFunctionTable(module, &table, &size) || at >= size) return 0;
    *table[at] = function;
    return 1;
}

// Called by NVTX at the program's first NVTX call. Returns 0 if the program's NVTX version is
// unknown.
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
    const NvtxExportTableCallbacks *callbacks = (const NvtxExportTableCallbacks *)export_table(
        NVTX_ETID_CALLBACKS);
    return callbacks &&
           take(callbacks, NVTX_CB_MODULE_CORE, NVTX_CBID_CORE_RangeStartA, (NvtxFunctionPointer)started) &&
           take(callbacks, NVTX_CB_MODULE_CORE, NVTX_CBID_CORE_RangeEnd, (NvtxFunctionPointer)ended) &&
           take(callbacks, NVTX_CB_MODULE_CUDART, NVTX_CBID_CUDART_NameCudaStreamA,
                (NvtxFunctionPointer)named);
}
