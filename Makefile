# Build rules only. `make` builds the CPU trainer and the tools; `make test-programs` the tests;
# `make help` lists the targets.
# Variables: BUILD (output folder), ARCH_CFLAGS (target CPU of host code; see below),
# SAN=1 (ASan + UBSan) or SAN=thread (TSan), ASSERTS=1 (check preconditions), WERROR=1, CC, MPICC.

BUILD       ?= build
comma       := ,
# Host code is built for x86-64-v3 (CPUs since 2013), so that one build runs on mixed clusters.
# OpenBLAS selects its kernels at run time. With ARCH_CFLAGS=-march=native the programs run only on
# the same CPU type; on others they exit with an error message.
ifeq ($(shell uname -m),x86_64)
ARCH_CFLAGS ?= -march=x86-64-v3
endif
MPICC       ?= mpicc
PKG_CONFIG  ?= pkg-config
ifneq ($(filter-out help clean,$(or $(MAKECMDGOALS),all)),)
ifeq ($(shell command -v $(MPICC) 2>/dev/null),)
$(error MPI: $(MPICC) was not found; install Open MPI (libopenmpi-dev) or MPICH, or name the compiler with MPICC=)
endif
endif

# A + marks a modified working tree.
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
COMMIT  := $(COMMIT)$(shell git rev-parse HEAD >/dev/null 2>&1 && { git diff --quiet HEAD || echo +; })
VERSION := 0.1.0

# No FMA contraction and no fast-math: bitwise identical results on every IEEE machine.
CFLAGS_BASE := -std=c11 -D_GNU_SOURCE -O3 $(ARCH_CFLAGS) -ffp-contract=off -fno-math-errno -g \
               -Wall -Wextra -Wshadow -Wvla -Wno-unused-parameter -Werror=switch -I. -MMD -MP
ifeq ($(WERROR),1)
CFLAGS_BASE += -Werror
endif
# Preconditions of public functions are asserts. Tests and sanitizer builds check them (ASSERTS=1);
# releases do not.
ifeq ($(ASSERTS)$(SAN)$(FUZZ),)
CFLAGS_BASE += -DNDEBUG
endif
# No AVX-512 with ASan: GCC 13.2 uses aligned 64-byte stores, but ASan's stack frames are not
# 64-byte aligned.
ifeq ($(SAN),1)
CFLAGS_BASE += -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined \
               $(if $(filter x86_64,$(shell uname -m)),-mno-avx512f)
LDFLAGS += -fsanitize=address,undefined
endif
ifeq ($(SAN),thread)
CFLAGS_BASE += -O1 -fno-omit-frame-pointer -fsanitize=thread
LDFLAGS += -fsanitize=thread
endif
# Fuzz targets with libFuzzer (make fuzz): the MPI wrapper calls clang, and every object is
# instrumented for coverage.
ifeq ($(FUZZ),1)
export OMPI_CC := clang
export MPICH_CC := clang
FUZZ_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all
CFLAGS_BASE += -O1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link $(FUZZ_FLAGS)
LDFLAGS += $(FUZZ_FLAGS)
endif
CFLAGS += $(CFLAGS_BASE)
# fp32 weights and activations, for finite-difference tests (llmc/base/dtype.h):
# make PRECISION=fp32 BUILD=build/fp32 ...
ifeq ($(PRECISION),fp32)
CFLAGS += -DPRECISION_FP32
endif

CJSON_CFLAGS  := $(shell $(PKG_CONFIG) --cflags libcjson 2>/dev/null)
BLAS_CFLAGS   := $(shell $(PKG_CONFIG) --cflags openblas 2>/dev/null)
BLAS_LIBS     := $(shell $(PKG_CONFIG) --libs openblas 2>/dev/null || echo -lopenblas)
CFLAGS        += $(CJSON_CFLAGS)
LIBS          := -lcjson -lxxhash -lpcre2-8 -lutf8proc -luring -lzmq -lpthread -lm
# STATIC_DEPS=1: relocatable programs. Links the static library if the system has one, else copies
# the shared library to lib/ next to the program.
ifeq ($(STATIC_DEPS),1)
DEPS     := cjson xxhash pcre2-8 utf8proc
ARCHIVED := $(foreach l,$(DEPS),$(if $(filter /%,$(shell $(MPICC) -print-file-name=lib$(l).a)),$(l)))
# ZeroMQ's static library needs many others, so the shared one is copied with its dependencies. The
# tests of failing disks intercept calls of liburing, which a static library prevents.
COPIED   := $(filter-out $(ARCHIVED),$(DEPS)) uring zmq
COPIES   := $(foreach l,$(COPIED),$(BUILD)/lib/lib$(l).so)
LIBS     := $(ARCHIVED:%=-l:lib%.a) $(COPIES) \
            $(if $(COPIED),-Wl$(comma)--disable-new-dtags \
            -Wl$(comma)-rpath$(comma)'$$ORIGIN/lib:$$ORIGIN/../../lib') -lpthread -lm
BLAS_LIBS := $(BLAS_LIBS:-lopenblas=-l:libopenblas.a)
endif

# Host code, linked into every program. The backend (CPU or CUDA) is selected at link time.
MODULES  := base ranks groups data config log state model checkpoint plan run
CPU_SRC  := $(wildcard llmc/cpu/*.c) sdp4bit/kernels_cpu.c sdp4bit/lossless_cpu.c sdp4bit/muon_cpu.c
HOST_SRC := $(filter-out $(CPU_SRC),$(wildcard $(MODULES:%=llmc/%/*.c) sdp4bit/*.c))
DATA_SRC := $(wildcard dev/data/*.c)
CONVERT_SRC := $(wildcard dev/convert/*.c)
TOOL_SRC := $(wildcard dev/lib/*.c)

HOST_OBJ := $(HOST_SRC:%.c=$(BUILD)/obj/%.o)
CONVERT_OBJ := $(CONVERT_SRC:%.c=$(BUILD)/obj/%.o)
TOOL_OBJ := $(TOOL_SRC:%.c=$(BUILD)/obj/%.o)
CPU_OBJ  := $(CPU_SRC:%.c=$(BUILD)/obj/%.o)
HOST_LIB := $(BUILD)/libllmc.a
CPU_LIB  := $(BUILD)/libllmc_cpu.a
# Converter for checkpoints of other programs. Not linked into the trainer.
CONVERT_LIB := $(BUILD)/libconvert.a
# Code shared by the tools. Not linked into the trainer.
TOOL_LIB := $(BUILD)/libtools.a
DATA_TOOLS := $(DATA_SRC:dev/data/%.c=$(BUILD)/%)
TOOLS    := $(DATA_TOOLS) $(BUILD)/convert_checkpoint $(BUILD)/rendezvous

UNIT_TESTS := $(patsubst %.c,$(BUILD)/%,$(wildcard test/unit/*/test_*.c))
MPI_TESTS  := $(patsubst %.c,$(BUILD)/%,$(wildcard test/mpi/test_*.c))
FAULT_SHIMS := $(patsubst %.c,$(BUILD)/%.so,$(wildcard test/fault/*shim.c))
# Benchmarks that run on either backend: $(BUILD)/dev/bench/NAME_cpu, and with CUDA
# $(BUILD)/dev/bench/NAME. They link train_gpt.c.
BENCHES     := train_presets sync_only generate
STEP_BOUND  := $(BUILD)/dev/bench/step_bound
SLOW_NETWORK := $(BUILD)/dev/bench/slow_network
CPU_BENCHES := $(BENCHES:%=$(BUILD)/dev/bench/%_cpu)
FUZZ_TARGETS := $(patsubst %.c,$(BUILD)/%,$(wildcard test/fuzz/fuzz_*.c))

.PHONY: all cpu tools bench dist test-programs fuzz fuzz-targets help clean
all: cpu tools
cpu: $(BUILD)/train_gpt_cpu $(BUILD)/generate_cpu
tools: $(TOOLS)
bench: cpu $(CPU_BENCHES) $(STEP_BOUND) $(SLOW_NETWORK)  # dev/bench/save.sh starts the trainer itself
# A tarball of the CPU programs, scripts and documents for machines without a compiler. Its programs
# need only the C library and Open MPI. It has no Makefile, so quickstart.sh does not build.
DIST := sdp4bit-$(VERSION)-linux-$(shell uname -m)
DIST_FILES := README.md LICENSE CITATION.cff configs dev docs llmc scripts sdp4bit
dist:
	$(MAKE) STATIC_DEPS=1 BUILD=$(BUILD)/static all
	rm -rf $(BUILD)/dist
	mkdir -p $(BUILD)/dist/$(DIST)/build
	tar -c --exclude=__pycache__ --exclude='scripts/test*' $(DIST_FILES) | tar -x -C $(BUILD)/dist/$(DIST)
	for program in train_gpt_cpu generate_cpu $(notdir $(TOOLS)); do \
	    strip -o $(BUILD)/dist/$(DIST)/build/$$program $(BUILD)/static/$$program || exit 1; done
	! [ -d $(BUILD)/static/lib ] || { mkdir $(BUILD)/dist/$(DIST)/build/lib && \
	    cp $(BUILD)/static/lib/*.so.* $(BUILD)/dist/$(DIST)/build/lib; }
	tar -C $(BUILD)/dist -czf $(BUILD)/$(DIST).tar.gz --owner=0 --group=0 $(DIST)
	@echo $(BUILD)/$(DIST).tar.gz
test-programs: $(UNIT_TESTS) $(MPI_TESTS) $(FAULT_SHIMS) bench all
test-programs: $(BUILD)/test/layer_dump $(BUILD)/test/fp8_dump $(BUILD)/test/train_gpt_fake
test-programs: $(BUILD)/test/e2e/group_member

# $(call stamp,FILE,TEXT): writes the text to the file if it differs from the file's content. Runs
# while make parses this file, so that -n and -q are correct.
define stamp
ifneq ($$(strip $$(shell cat $(1) 2>/dev/null)),$$(strip $(2)))
$(1): FORCE
endif
$(1):
	@mkdir -p $$(@D)
	@printf '%s\n' '$$(subst ','\'',$(2))' > $$@
endef
# Compiler and flags: objects are rebuilt when they change. WERROR is excluded, because it does not
# affect objects.
OBJ_FLAGS = $(MPICC) $(filter-out -Werror,$(CFLAGS)) $(BLAS_CFLAGS)
$(eval $(call stamp,$(BUILD)/flags,$$(OBJ_FLAGS)))

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(MPICC) $(CFLAGS) -c $< -o $@

# The one file that names the commit is rebuilt when the commit changes.
$(BUILD)/obj/llmc/base/version.o: CFLAGS += -DLLMC_COMMIT='"$(COMMIT)"' -DLLMC_VERSION='"$(VERSION)"'
$(BUILD)/obj/llmc/base/version.o: $(BUILD)/commit
$(eval $(call stamp,$(BUILD)/commit,$$(COMMIT) $$(VERSION)))
.PHONY: FORCE
FORCE:

$(BUILD)/obj/llmc/cpu/%.o: CFLAGS += $(BLAS_CFLAGS)

$(HOST_LIB): $(HOST_OBJ) | $(COPIES)
	@rm -f $@
	ar rcs $@ $^
$(BUILD)/lib/lib%.so:
	@mkdir -p $(@D)
	file=$$(readlink -f $$($(MPICC) -print-file-name=lib$*.so)) && \
	    cp $$file $(@D)/$$(objdump -p $$file | awk '$$1 == "SONAME" {print $$2}') && \
	    for used in $$(ldd $$file | \
	        awk '$$3 ~ /^\// && $$1 !~ /^lib(c|m|pthread|dl|rt|resolv)\.so/ {print $$3}'); do \
	        cp -L $$used $(@D) || exit 1; done && cp $$file $@
$(CONVERT_LIB): $(CONVERT_OBJ)
	@rm -f $@
	ar rcs $@ $^
$(TOOL_LIB): $(TOOL_OBJ)
	@rm -f $@
	ar rcs $@ $^
$(CPU_LIB): $(CPU_OBJ)
	@rm -f $@
	ar rcs $@ $^

# $(call link_cpu,LIBRARIES): links the target's prerequisites, the CPU backend and the libraries.
link_cpu = $(MPICC) $(LDFLAGS) $(filter %.o,$^) $(filter $(CONVERT_LIB),$^) $(filter $(TOOL_LIB),$^) \
           -Wl,--start-group $(HOST_LIB) $(CPU_LIB) -Wl,--end-group \
           $(1) $(BLAS_LIBS) $(LIBS) -o $@

$(BUILD)/train_gpt_cpu: $(BUILD)/obj/main.o $(BUILD)/obj/train_gpt.o $(HOST_LIB) $(CPU_LIB)
	$(call link_cpu)

# The trainer with a stand-in for the network of replica groups (test/fake).
$(BUILD)/test/train_gpt_fake: $(BUILD)/obj/main.o $(BUILD)/obj/train_gpt.o $(BUILD)/obj/test/fake/member.o \
                              $(HOST_LIB) $(CPU_LIB)
	@mkdir -p $(@D)
	$(call link_cpu)

$(BUILD)/generate_cpu: $(BUILD)/obj/dev/generate.o $(TOOL_LIB) $(HOST_LIB) $(CPU_LIB)
	$(call link_cpu)

$(DATA_TOOLS): $(BUILD)/%: $(BUILD)/obj/dev/data/%.o
$(DATA_TOOLS): $(TOOL_LIB) $(HOST_LIB)
	$(MPICC) $(LDFLAGS) $(filter %.o,$^) $(TOOL_LIB) $(HOST_LIB) $(LIBS) -o $@
$(BUILD)/rendezvous: $(BUILD)/obj/dev/rendezvous.o $(TOOL_LIB) $(HOST_LIB)
	$(MPICC) $(LDFLAGS) $(filter %.o,$^) $(TOOL_LIB) $(HOST_LIB) $(LIBS) -o $@
$(STEP_BOUND): $(BUILD)/obj/dev/bench/step_bound.o
$(SLOW_NETWORK): $(BUILD)/obj/dev/bench/slow_network.o
$(STEP_BOUND) $(SLOW_NETWORK): $(HOST_LIB)
	@mkdir -p $(@D)
	$(MPICC) $(LDFLAGS) $(filter %.o,$^) $(HOST_LIB) $(LIBS) -o $@
# Uses the model's parameter table, which pulls in the ops.
$(BUILD)/convert_checkpoint: $(BUILD)/obj/dev/convert_checkpoint.o $(CONVERT_LIB) $(TOOL_LIB) \
                             $(HOST_LIB) $(CPU_LIB)
	$(call link_cpu)

$(BUILD)/test/%: $(BUILD)/obj/test/%.o $(TOOL_LIB) $(HOST_LIB) $(CPU_LIB)
	@mkdir -p $(@D)
	$(call link_cpu,-lcmocka)
# Programs that compare with the single-process communication simulator.
SIMULATOR_TESTS := mpi/test_sdp4bit_mpi mpi/test_local_mpi unit/sdp4bit/test_simulator \
                   unit/sdp4bit/test_activations
$(SIMULATOR_TESTS:%=$(BUILD)/test/%): $(BUILD)/obj/test/mpi/simulator.o

CONVERT_TESTS := unit/convert/test_hf unit/convert/test_hf_ids unit/convert/test_hf_config \
                 unit/convert/test_megatron unit/convert/test_pickle unit/run/test_eval_tasks \
                 fuzz/fuzz_hf fuzz/fuzz_pickle fuzz/fuzz_torch_file
$(CONVERT_TESTS:%=$(BUILD)/test/%): $(CONVERT_LIB)

$(BUILD)/test/unit/run/test_eval_tasks: $(BUILD)/obj/train_gpt.o
$(BUILD)/test/mpi/test_sdp4bit_mpi: $(BUILD)/obj/test/mpi/model_gradients.o

# Fuzz targets replay given inputs (replay.c) or search for inputs with libFuzzer's main(). mmap is
# wrapped: see fuzz_shard.c.
$(FUZZ_TARGETS): $(BUILD)/obj/test/fuzz/files.o
ifeq ($(FUZZ),1)
$(FUZZ_TARGETS): LDFLAGS += -fsanitize=fuzzer
else
$(FUZZ_TARGETS): $(BUILD)/obj/test/fuzz/replay.o
endif
# Functions that tests replace with the linker's --wrap.
$(BUILD)/test/unit/ranks/test_parallel: LDFLAGS += -Wl,--wrap=pthread_create
$(BUILD)/test/unit/ranks/test_stop: LDFLAGS += -Wl,--wrap=monotonic_seconds
$(BUILD)/test/unit/sdp4bit/test_update_host: LDFLAGS += -Wl,--wrap=heartbeat_progress
$(BUILD)/test/unit/state/test_overlap: LDFLAGS += -Wl,--wrap=disk_update,--wrap=disk_read,--wrap=disk_write \
    -Wl,--wrap=disk_open_chunk,--wrap=disk_update_chunk
# Its ops and collectives take precedence over the backend's.
$(BUILD)/test/unit/model/test_tensor_overlap: LDFLAGS += -Wl,--allow-multiple-definition
$(BUILD)/test/unit/model/test_tensor_open: LDFLAGS += -Wl,--wrap=comm_own_gpus,--wrap=comm_open_direct
$(BUILD)/test/unit/model/test_gpt: LDFLAGS += -Wl,--wrap=zero_reduce_unit
$(BUILD)/test/mpi/test_heartbeat: LDFLAGS += -Wl,--wrap=mmap,--wrap=pthread_create,--wrap=nanosleep
$(BUILD)/test/mpi/test_layout $(BUILD)/test/gpu/test_layout: LDFLAGS += -Wl,--wrap=activations_encode
$(BUILD)/test/fuzz/fuzz_shard: LDFLAGS += -Wl,--wrap=mmap,--wrap=munmap
fuzz-targets: $(FUZZ_TARGETS)
fuzz:
	@command -v clang >/dev/null || { echo "clang was not found: libFuzzer is part of it; on Debian:" \
	    "apt-get install clang libclang-rt-14-dev" >&2; exit 1; }
	$(MAKE) FUZZ=1 BUILD=$(BUILD)/fuzz fuzz-targets

# LD_PRELOAD libraries for test/fault/*.sh. They make file operations, allocations or collectives
# fail, or kill the process. Built without sanitizers, because plain programs load them.
$(BUILD)/test/fault/%.so: test/fault/%.c
	@mkdir -p $(@D)
	$(MPICC) -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Wno-unused-parameter -fPIC -shared $< -ldl -o $@

$(BUILD)/dev/bench/generate_cpu $(BUILD)/dev/bench/generate: $(TOOL_LIB)
$(BUILD)/dev/bench/train_presets_cpu $(BUILD)/dev/bench/train_presets: $(BUILD)/obj/train_gpt.o
$(CPU_BENCHES): $(BUILD)/dev/bench/%_cpu: $(BUILD)/obj/dev/bench/%.o $(HOST_LIB) $(CPU_LIB)
	@mkdir -p $(@D)
	$(call link_cpu)

# Programs that run every op on one backend and dump the results, which test/gpu/compare_dumps.py
# compares. Both backends define the same symbols, so there are two programs: $(BUILD)/test/ops_dump
# (CPU) and $(BUILD)/test/gpu/ops_dump (GPU).
OPS_PROGRAMS := ops_dump ops_invariants kernels_dump layer_dump fp8_dump
$(OPS_PROGRAMS:%=$(BUILD)/test/%): $(BUILD)/test/%: $(BUILD)/obj/test/gpu/%.o $(HOST_LIB) $(CPU_LIB)
	@mkdir -p $(@D)
	$(call link_cpu)

# --- the CUDA program -----------------------------------------------------------------------------
# make gpu: build/train_gpt. make gpu-test-programs: tests that need a GPU. make gpu-check: compiles
# every CUDA object for all architectures and the C part of GPU tests without linking; FAST=1
# compiles for the oldest architecture without optimization, in a tenth of the time.
# Variables: ARCH ("sm_90 sm_100", native; default: all that the toolkit supports), CUDA_HOME,
# NCCL_HOME, CUDNN_HOME, CUDNN_FRONTEND (folder of cudnn_frontend.h), STATIC_DEPS=1 (relocatable
# program: cJSON, xxHash, PCRE2, utf8proc, liburing and ZeroMQ are linked statically or copied to
# lib/ next to it).

GPU_PROGRAMS := $(BUILD)/train_gpt $(BUILD)/generate $(BUILD)/test/gpu/% $(BUILD)/dev/bench/%
GPU_GOALS := $(filter gpu gpu-% $(GPU_PROGRAMS),$(filter-out $(CPU_BENCHES) $(STEP_BOUND),$(MAKECMDGOALS)))
ifneq ($(GPU_GOALS),)
PYTHON           ?= python3
FRONTEND_VERSION := 1.32.0

# Search path for headers and libraries: folders given as variables, the toolkit, the system,
# NVIDIA's Python packages.
CUDA_HOME   ?= $(firstword $(patsubst %/bin/nvcc,%,$(shell command -v nvcc 2>/dev/null)) \
                           $(wildcard /usr/local/cuda /opt/cuda))
NVCC        ?= $(CUDA_HOME)/bin/nvcc
PY_PACKAGES := $(shell $(PYTHON) -c 'import nvidia, os; \
                 print(*[os.path.dirname(p) for p in nvidia.__path__])' 2>/dev/null)
PY_NVIDIA   := $(foreach p,$(PY_PACKAGES),$(wildcard $(p)/nvidia/*))
MACHINE      := $(shell $(MPICC) -dumpmachine)
HOMES        := $(NCCL_HOME) $(CUDNN_HOME) $(CUDA_HOME) /usr /usr/local
INCLUDE_DIRS := $(HOMES:%=%/include) /usr/include/$(MACHINE) $(PY_NVIDIA:%=%/include)
LIBRARY_DIRS := $(foreach d,$(HOMES),$(d)/lib64 $(d)/lib $(d)/lib/$(MACHINE)) $(PY_NVIDIA:%=%/lib)
header_dir   = $(patsubst %/$(1),%,$(firstword $(wildcard $(addsuffix /$(1),$(2)))))
library      = $(firstword $(foreach d,$(LIBRARY_DIRS),$(wildcard $(d)/lib$(1).so $(d)/lib$(1).so.[0-9]*)))
version_of   = $(shell sed -n 's/^.define $(2) *\([0-9]*\).*/\1/p' $(1) | head -n 1)

NVCC_VERSION := $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
ifeq ($(NVCC_VERSION),)
$(error CUDA: nvcc was not found; install the CUDA toolkit 12.0 or newer, or name its folder with CUDA_HOME=)
endif
$(info CUDA $(NVCC_VERSION) in $(CUDA_HOME))
ifeq ($(filter 11.% 10.% 9.%,$(NVCC_VERSION)),$(NVCC_VERSION))
$(error CUDA: $(NVCC_VERSION) is too old; install 12.0 or newer)
endif

MPI_CFLAGS := $(shell $(MPICC) --showme:compile 2>/dev/null || \
                $(MPICC) -compile_info 2>/dev/null | tr ' ' '\n' | grep '^-I')
$(info MPI $(shell $(MPICC) --showme:version 2>/dev/null || command -v $(MPICC)))

# A folder given as a variable must contain the library; there is no fallback.
named = $(if $($(1)),$(if $(wildcard $($(1))/include/$(2)),,$(error $(3): $(1)=$($(1)) has no include/$(2); set it to the right folder, or unset it)))
$(call named,NCCL_HOME,nccl.h,NCCL)
$(call named,CUDNN_HOME,cudnn.h,cuDNN)

NCCL_INCLUDE := $(call header_dir,nccl.h,$(INCLUDE_DIRS))
ifeq ($(NCCL_INCLUDE),)
$(error NCCL: nccl.h was not found; install libnccl-dev or the Python package nvidia-nccl-cu$(basename $(NVCC_VERSION)), or name its folder with NCCL_HOME=)
endif
$(info NCCL $(call version_of,$(NCCL_INCLUDE)/nccl.h,NCCL_MAJOR).$(call version_of,$(NCCL_INCLUDE)/nccl.h,NCCL_MINOR) in $(NCCL_INCLUDE))

CUDNN_INCLUDE := $(call header_dir,cudnn.h,$(INCLUDE_DIRS))
ifeq ($(CUDNN_INCLUDE),)
$(error cuDNN: cudnn.h was not found; install libcudnn9-dev-cuda-$(basename $(NVCC_VERSION)) or the Python package nvidia-cudnn-cu$(basename $(NVCC_VERSION)), or name its folder with CUDNN_HOME=)
endif
$(info cuDNN $(call version_of,$(CUDNN_INCLUDE)/cudnn_version.h,CUDNN_MAJOR).$(call version_of,$(CUDNN_INCLUDE)/cudnn_version.h,CUDNN_MINOR) in $(CUDNN_INCLUDE))

# cudnn-frontend is header-only. If it is not installed, a pinned version of its Python package is
# downloaded into the build folder once.
FRONTEND_FETCHED := $(BUILD)/cudnn-frontend/include
FRONTEND_PLACES  := /usr/include /usr/local/include $(PY_PACKAGES:%=%/include)
FRONTEND_INCLUDE := $(or $(CUDNN_FRONTEND),$(call header_dir,cudnn_frontend.h,$(FRONTEND_PLACES)), \
                         $(FRONTEND_FETCHED))
ifneq ($(FRONTEND_INCLUDE),$(FRONTEND_FETCHED))
ifeq ($(wildcard $(FRONTEND_INCLUDE)/cudnn_frontend.h),)
$(error cudnn-frontend: $(FRONTEND_INCLUDE)/cudnn_frontend.h does not exist; CUDNN_FRONTEND= names the folder of cudnn_frontend.h)
endif
endif
# Default include folders must not be repeated with -isystem: they would come before the folders of
# the C++ library, whose #include_next then fails with "fatal error: math.h".
SYSTEM_INCLUDES := /usr/include /usr/local/include /usr/include/$(MACHINE)
GPU_INCLUDES := $(filter-out $(SYSTEM_INCLUDES),$(CUDNN_INCLUDE) $(NCCL_INCLUDE) $(FRONTEND_INCLUDE))
$(info cudnn-frontend in $(FRONTEND_INCLUDE)$(if $(wildcard $(FRONTEND_INCLUDE)/cudnn_frontend.h),, (to be fetched: nvidia-cudnn-frontend $(FRONTEND_VERSION))))

# Machine code for each architecture, and PTX of the newest for future GPUs.
BEFORE_12_8 := 12.0 12.1 12.2 12.3 12.4 12.5 12.6 12.7
ALL_ARCHS := sm_80 sm_90 $(if $(filter $(BEFORE_12_8),$(NVCC_VERSION)),,sm_100 sm_120)
ARCH      ?= $(ALL_ARCHS)
ifneq ($(filter gpu-check,$(GPU_GOALS)),)
override ARCH := $(if $(filter 1,$(FAST)),$(firstword $(ALL_ARCHS)),$(ALL_ARCHS))
endif
sm = $(patsubst sm_%,%,$(1))
ifeq ($(ARCH),native)
GENCODE := -arch=native
else
GENCODE := $(foreach a,$(ARCH),-gencode arch=compute_$(call sm,$(a)),code=$(a)) \
           -gencode arch=compute_$(call sm,$(lastword $(ARCH))),code=compute_$(call sm,$(lastword $(ARCH)))
endif

# Objects of gpu-check FAST=1 go to a separate folder, so that they are never linked.
ifeq ($(FAST),1)
ifneq ($(GPU_GOALS),gpu-check)
$(error FAST=1 only goes with gpu-check: its code is slow)
endif
CUDA_DIR := $(BUILD)/cuda-fast
CUDA_OPTIMIZE := -O0 $(if $(shell $(NVCC) --help | grep -e --Ofast-compile),-Ofc max,-Xcicc -O0 -Xptxas -O0)
CUDA_OPTIMIZE_HOST := -O0
else
CUDA_DIR := $(BUILD)/cuda
CUDA_OPTIMIZE := -O3 -lineinfo
CUDA_OPTIMIZE_HOST := -O1 -lineinfo
endif

# Host code uses the same floating-point flags as C. Device code allows FMA contraction; code that
# must not depend on it uses intrinsics with explicit rounding.
ifeq ($(ASSERTS)$(SAN)$(FUZZ),)
NVCCFLAGS += -DNDEBUG
endif
NVCCFLAGS += -std=c++17 $(GENCODE) -I. $(MPI_CFLAGS) $(CJSON_CFLAGS) -DOMPI_SKIP_MPICXX \
             $(addprefix -isystem ,$(GPU_INCLUDES)) \
             -Xcompiler -Wall,-Wextra,-Werror=switch,-Wno-unused-parameter,-Wno-missing-field-initializers \
             -Xcompiler -ffp-contract=off,-fno-math-errno
ifeq ($(WERROR),1)
NVCCFLAGS += -Werror all-warnings -Xcompiler -Werror
endif

CUDA_SRC  := $(wildcard llmc/cuda/*.cu) $(wildcard sdp4bit/*.cu)
CUDA_HOST := $(wildcard llmc/cuda/*.cpp)
CUDA_OBJ  := $(CUDA_SRC:%.cu=$(CUDA_DIR)/%.o) $(CUDA_HOST:%.cpp=$(CUDA_DIR)/%.o)
CUDA_LIB  := $(BUILD)/libllmc_cuda.a
GPU_TESTS := $(patsubst test/gpu/%.cu,$(BUILD)/test/gpu/%,$(wildcard test/gpu/test_*.cu))
MODEL_RANKS := test_sdp4bit_mpi test_local_mpi test_layout
GPU_TEST_OBJ := $(GPU_TESTS:$(BUILD)/%=$(CUDA_DIR)/%.o)
GPU_BENCH_OBJ := $(patsubst %.cu,$(CUDA_DIR)/%.o,$(wildcard dev/bench/*.cu))

.PHONY: gpu gpu-bench gpu-check gpu-test-programs
gpu: $(BUILD)/train_gpt $(BUILD)/generate
gpu-bench: $(BUILD)/train_gpt $(BENCHES:%=$(BUILD)/dev/bench/%) $(BUILD)/dev/bench/node_hop $(STEP_BOUND)
gpu-bench: $(BUILD)/dev/bench/tensor_collectives
gpu-test-programs: $(GPU_TESTS) $(OPS_PROGRAMS:%=$(BUILD)/test/gpu/%) $(MODEL_RANKS:%=$(BUILD)/test/gpu/%)
gpu-test-programs: $(BUILD)/test/gpu/profile_names.so
gpu-check: $(CUDA_OBJ) $(GPU_TEST_OBJ) $(GPU_BENCH_OBJ) \
           $(OPS_PROGRAMS:%=$(BUILD)/obj/test/gpu/%.o)

$(FRONTEND_FETCHED)/cudnn_frontend.h:
	@mkdir -p $(BUILD)/cudnn-frontend
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest $(BUILD)/cudnn-frontend \
	    nvidia-cudnn-frontend==$(FRONTEND_VERSION) || \
	    { echo "cudnn-frontend could not be fetched; get its headers (version $(FRONTEND_VERSION))" \
	           "and name their folder with CUDNN_FRONTEND=" >&2; exit 1; }
	cd $(BUILD)/cudnn-frontend && $(PYTHON) -m zipfile -e nvidia_cudnn_frontend-*.whl .
	@touch $@

CUDA_FLAGS = $(NVCC) $(CUDA_OPTIMIZE) $(CUDA_OPTIMIZE_HOST) \
             $(filter-out -Werror all-warnings -Xcompiler,$(NVCCFLAGS))
$(eval $(call stamp,$(CUDA_DIR)/flags,$$(CUDA_FLAGS)))
$(CUDA_DIR)/%.o: %.cu $(CUDA_DIR)/flags
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_OPTIMIZE) $(NVCCFLAGS) -MMD -MP -x cu -c $< -o $@
# Compiled as plain C++: cudnn-frontend's headers take most of a minute to compile, and nvcc would
# compile them once per architecture.
$(CUDA_DIR)/%.o: %.cpp $(CUDA_DIR)/flags | $(FRONTEND_INCLUDE)/cudnn_frontend.h
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_OPTIMIZE_HOST) $(NVCCFLAGS) -MMD -MP -x c++ -c $< -o $@

$(CUDA_LIB): $(CUDA_OBJ)
	@rm -f $@
	ar rcs $@ $^

# Linked with the MPI compiler wrapper, which adds MPI's flags. The CUDA runtime is static; the
# other libraries get an rpath to where they were found.
ifeq ($(filter gpu-check,$(GPU_GOALS)),)
gpu_library = $(or $(call library,$(1)),$(error $(2): lib$(1).so was not found beside its header; install the library too, or name its folder with $(3)=))
GPU_SHARED  := $(call gpu_library,cublasLt,cuBLAS,CUDA_HOME) $(call gpu_library,cudnn,cuDNN,CUDNN_HOME) \
               $(call gpu_library,nccl,NCCL,NCCL_HOME)
CUDART      := $(firstword $(foreach d,$(LIBRARY_DIRS),$(wildcard $(d)/libcudart_static.a)))
GPU_LIBS    := $(GPU_SHARED) $(addprefix -Wl$(comma)-rpath$(comma),$(sort $(dir $(GPU_SHARED)))) $(CUDART) \
               -lstdc++ -ldl -lrt
endif

link_gpu = $(MPICC) $(LDFLAGS) -Wl,--as-needed $(filter %.o,$^) $(filter $(TOOL_LIB),$^) \
           -Wl,--start-group $(HOST_LIB) $(CUDA_LIB) -Wl,--end-group $(GPU_LIBS) $(LIBS) -o $@

GPU_LINKED := $(HOST_LIB) $(CUDA_LIB) $(COPIES)
$(BUILD)/train_gpt: $(BUILD)/obj/main.o $(BUILD)/obj/train_gpt.o $(GPU_LINKED)
	$(link_gpu)
$(BUILD)/generate: $(BUILD)/obj/dev/generate.o $(TOOL_LIB) $(GPU_LINKED)
	$(link_gpu)
$(OPS_PROGRAMS:%=$(BUILD)/test/gpu/%): $(BUILD)/test/gpu/%: $(BUILD)/obj/test/gpu/%.o $(GPU_LINKED)
	@mkdir -p $(@D)
	$(link_gpu)
# GPU builds of MPI tests. Some compare communication with the single-process simulator, which runs
# on the host; the others run the model in every layout.
$(BUILD)/test/gpu/test_sdp4bit_mpi: $(BUILD)/obj/test/mpi/simulator.o $(BUILD)/obj/test/mpi/model_gradients.o
$(BUILD)/test/gpu/test_local_mpi: $(BUILD)/obj/test/mpi/simulator.o
$(MODEL_RANKS:%=$(BUILD)/test/gpu/%): $(BUILD)/test/gpu/%: $(BUILD)/obj/test/mpi/%.o $(GPU_LINKED)
	@mkdir -p $(@D)
	$(link_gpu)
$(BENCHES:%=$(BUILD)/dev/bench/%): $(BUILD)/dev/bench/%: $(BUILD)/obj/dev/bench/%.o $(GPU_LINKED)
	@mkdir -p $(@D)
	$(link_gpu)
# A CUDA injection library: see the head of kernel_trace.c.
$(BUILD)/dev/bench/%.so: dev/bench/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 -Wall -Wextra -shared -fPIC -I$(CUDA_HOME)/include $< \
	    -L$(CUDA_HOME)/lib64 -lcupti -Wl,-rpath,$(CUDA_HOME)/lib64 -o $@
$(BUILD)/test/gpu/%.so: test/gpu/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 -Wall -Wextra -Wno-unused-parameter -shared -fPIC -I$(CUDA_HOME)/include $< -o $@
$(BUILD)/dev/bench/node_hop: $(CUDA_DIR)/dev/bench/node_hop_ways.o
$(BUILD)/dev/bench/%: $(CUDA_DIR)/dev/bench/%.o $(GPU_LINKED)
	@mkdir -p $(@D)
	$(link_gpu)
$(BUILD)/test/gpu/%: $(CUDA_DIR)/test/gpu/%.o $(GPU_LINKED)
	@mkdir -p $(@D)
	$(link_gpu)
endif

help:
	@echo "make                 CPU trainer and tools in $(BUILD)/ (make cpu, make tools: one of them)"
	@echo "make test-programs   trainer, tools and test programs"
	@echo "make dist            tarball of the CPU programs for machines without a compiler"
	@echo "make gpu             the CUDA trainer $(BUILD)/train_gpt"
	@echo "make gpu-check       compile all CUDA code without linking; make gpu-test-programs: GPU tests"
	@echo "make bench           CPU trainer and benchmarks for CPU ranks in $(BUILD)/dev/bench/"
	@echo "make gpu-bench       CUDA trainer and benchmarks for GPUs"
	@echo "make ASSERTS=1 BUILD=build-debug ...   with asserts enabled"
	@echo "make SAN=1 BUILD=build-san ...   with asserts, AddressSanitizer and UBSan"
	@echo "make SAN=thread BUILD=build-tsan ...   with ThreadSanitizer"
	@echo "make fuzz            fuzz targets in $(BUILD)/fuzz/test/fuzz/, with clang's libFuzzer"
	@echo "make clean           remove $(BUILD)/"
	@echo "Variables: BUILD=folder, WERROR=1, CC, MPICC, ARCH_CFLAGS; for GPUs ARCH=native or \"sm_90 ...\","
	@echo "           CUDA_HOME, NCCL_HOME, CUDNN_HOME, CUDNN_FRONTEND, STATIC_DEPS=1"
clean:
	rm -rf $(BUILD)

.PRECIOUS: $(BUILD)/obj/%.o $(BUILD)/cuda/%.o
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
