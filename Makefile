# Build rules only. `make` builds the CPU trainer and the tools; `make test-programs` the tests; `make help` lists the targets.
# Variables: BUILD (output folder), ARCH_CFLAGS (default -march=native), SAN=1 (ASan + UBSan), WERROR=1, CC, MPICC.

BUILD       ?= build
ARCH_CFLAGS ?= -march=native
MPICC       ?= mpicc
PKG_CONFIG  ?= pkg-config

COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)$(shell git diff --quiet HEAD 2>/dev/null || echo +)
VERSION := 0.1.0

# Exact regime: no contraction into FMA, no fast-math; the same bits on every IEEE machine.
CFLAGS_BASE := -std=c11 -D_GNU_SOURCE -O3 $(ARCH_CFLAGS) -ffp-contract=off -fno-math-errno -g -Wall -Wextra -Wshadow -Wvla -Wno-unused-parameter -I. -MMD -MP
ifeq ($(WERROR),1)
CFLAGS_BASE += -Werror
endif
ifeq ($(SAN),1)
CFLAGS_BASE += -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
LDFLAGS += -fsanitize=address,undefined
endif
CFLAGS += $(CFLAGS_BASE)
# fp32 weights and activations, for finite-difference tests of the same code (llmc/dtype.h): make PRECISION=fp32 BUILD=build/fp32 ...
ifeq ($(PRECISION),fp32)
CFLAGS += -DPRECISION_FP32
endif

CJSON_CFLAGS  := $(shell $(PKG_CONFIG) --cflags libcjson 2>/dev/null)
BLAS_CFLAGS   := $(shell $(PKG_CONFIG) --cflags openblas 2>/dev/null)
BLAS_LIBS     := $(shell $(PKG_CONFIG) --libs openblas 2>/dev/null || echo -lopenblas)
CFLAGS        += $(CJSON_CFLAGS)
LIBS          := -lcjson -lxxhash -lpcre2-8 -lpthread -lm

# Host code, compiled once and linked into every program; the CPU backend is a separate set of objects chosen at link time.
HOST_SRC := $(wildcard llmc/*.c) $(filter-out sdp4bit/kernels_cpu.c,$(wildcard sdp4bit/*.c))
CPU_SRC  := $(wildcard llmc/cpu/*.c) sdp4bit/kernels_cpu.c
TOOL_SRC := $(wildcard dev/data/*.c)

HOST_OBJ := $(HOST_SRC:%.c=$(BUILD)/obj/%.o)
CPU_OBJ  := $(CPU_SRC:%.c=$(BUILD)/obj/%.o)
HOST_LIB := $(BUILD)/libllmc.a
CPU_LIB  := $(BUILD)/libllmc_cpu.a
TOOLS    := $(TOOL_SRC:dev/data/%.c=$(BUILD)/%)

UNIT_TESTS := $(patsubst test/unit/%.c,$(BUILD)/test/unit/%,$(wildcard test/unit/test_*.c))
MPI_TESTS  := $(patsubst test/mpi/%.c,$(BUILD)/test/mpi/%,$(wildcard test/mpi/test_*.c))

.PHONY: all cpu tools test-programs help clean
all: cpu tools
cpu: $(BUILD)/train_gpt_cpu
tools: $(TOOLS)
test-programs: $(UNIT_TESTS) $(MPI_TESTS) all

$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(MPICC) $(CFLAGS) -c $< -o $@

# The one file that names the commit is rebuilt when the commit changes.
$(BUILD)/obj/llmc/version.o: CFLAGS += -DLLMC_COMMIT='"$(COMMIT)"' -DLLMC_VERSION='"$(VERSION)"'
$(BUILD)/obj/llmc/version.o: $(BUILD)/commit
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT) $(VERSION)' | cmp -s - $@ || echo '$(COMMIT) $(VERSION)' > $@
FORCE:

$(BUILD)/obj/llmc/cpu/%.o: CFLAGS += $(BLAS_CFLAGS)

# train_gpt.cu is written in the common subset of C11 and CUDA C++: as C for CPU ranks.
$(BUILD)/obj/train_gpt_cpu.o: train_gpt.cu
	@mkdir -p $(@D)
	$(MPICC) $(CFLAGS) -x c -c $< -o $@
# The same file without its main, for tests of the model.
$(BUILD)/obj/train_gpt_test.o: train_gpt.cu
	@mkdir -p $(@D)
	$(MPICC) $(CFLAGS) -Dmain=train_gpt_main -x c -c $< -o $@

$(HOST_LIB): $(HOST_OBJ)
	@rm -f $@
	ar rcs $@ $^
$(CPU_LIB): $(CPU_OBJ)
	@rm -f $@
	ar rcs $@ $^

$(BUILD)/train_gpt_cpu: $(BUILD)/obj/train_gpt_cpu.o $(HOST_LIB) $(CPU_LIB)
	$(MPICC) $(LDFLAGS) $< -Wl,--start-group $(HOST_LIB) $(CPU_LIB) -Wl,--end-group $(BLAS_LIBS) $(LIBS) -o $@

$(TOOLS): $(BUILD)/%: $(BUILD)/obj/dev/data/%.o $(HOST_LIB)
	$(MPICC) $(LDFLAGS) $^ $(LIBS) -o $@

$(BUILD)/test/%: $(BUILD)/obj/test/%.o $(HOST_LIB) $(CPU_LIB)
	@mkdir -p $(@D)
	$(MPICC) $(LDFLAGS) $< $(filter-out $<,$(filter %.o,$^)) -Wl,--start-group $(CPU_LIB) $(HOST_LIB) -Wl,--end-group -lcmocka $(BLAS_LIBS) $(LIBS) -o $@
# The one-process simulator of the exact regime serves two programs.
$(BUILD)/test/mpi/test_sdp4bit_mpi $(BUILD)/test/unit/test_simulator: $(BUILD)/obj/test/mpi/simulator.o

# Tests of the model link the trainer's own file.
$(BUILD)/test/unit/test_gpt: $(BUILD)/obj/train_gpt_test.o

help:
	@echo "make                 CPU trainer and tools in $(BUILD)/"
	@echo "make test-programs   everything plus the test programs"
	@echo "make SAN=1 BUILD=build-san ...   with AddressSanitizer and UBSan"
	@echo "make clean           remove $(BUILD)/"
clean:
	rm -rf $(BUILD)

.SECONDARY:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
