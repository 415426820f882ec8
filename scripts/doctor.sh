#!/usr/bin/env bash
# Checks the requirements of the CPU program, the tests and the GPU program on this machine and
# prints one line each, to paste into a bug report. Changes nothing. Exits with 0 if the CPU program
# can be built and started, otherwise with 3.
#
#   scripts/doctor.sh
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked scripts/doctor.sh "$@"
[ $# = 0 ] || die 2 "unknown argument $1; doctor.sh has no options"

broken=0
line() { printf '%-24s %s\n' "$1" "$2"; } # NAME RESULT
first_line() { head -n 1 | tr -s ' '; }

# Prints the version of an installed requirement.
version_of() {
    case $1 in
    "C compiler") "$(c_compiler)" --version | first_line ;;
    "C++ compiler") g++ --version | first_line ;;
    make) make --version | first_line ;;
    pkg-config) pkg-config --version ;;
    "MPI compiler") mpicc --version | first_line ;;
    mpirun) mpirun --version 2>/dev/null | first_line ;;
    OpenBLAS) pkg-config --modversion openblas 2>/dev/null ;;
    cJSON) pkg-config --modversion libcjson 2>/dev/null ;;
    xxHash) pkg-config --modversion libxxhash 2>/dev/null ;;
    PCRE2) pkg-config --modversion libpcre2-8 2>/dev/null ;;
    utf8proc) pkg-config --modversion libutf8proc 2>/dev/null ;;
    liburing) pkg-config --modversion liburing 2>/dev/null ;;
    ZeroMQ) pkg-config --modversion libzmq 2>/dev/null ;;
    cmocka) pkg-config --modversion cmocka 2>/dev/null ;;
    "Python 3") python3 --version ;;
    esac
}

say "== this machine =="
changed=$(git diff --quiet HEAD 2>/dev/null || echo ', changed')
line commit "$(git log -1 --format='%h of %cs' 2>/dev/null || echo unknown)$changed"
line system "$(. /etc/os-release 2>/dev/null && echo "$PRETTY_NAME, ")$(uname -sr), $(uname -m)"
line processor "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1), \
$(core_count) cores"
line memory "$(awk '/^MemTotal/ {t = $2} /^MemAvailable/ {a = $2}
    END {printf "%.1f GiB, %.1f free", t / 1048576, a / 1048576}' /proc/meminfo 2>/dev/null)"

say "== the CPU program and its tests =="
while IFS='|' read -r who name packages check; do
    # shellcheck disable=SC2086 # split on purpose
    if $check </dev/null; then
        line "$name" "ok $(version_of "$name")"
    else
        line "$name" "missing ($packages)"
        [ "${who%% *}" = test ] || broken=1
    fi
done < <(requirements)

# Start two ranks that do nothing.
if ! have_command mpirun; then
    line "mpirun with 2 ranks" "skipped"
elif output=$(launch 2 true 2>&1); then
    line "mpirun with 2 ranks" ok
else
    line "mpirun with 2 ranks" "fails: $(tail -n 1 <<<"$output")"
    broken=1
fi
free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
if [ "$free_mib" -ge 1024 ]; then
    line "free disk here" "ok $((free_mib / 1024)) GiB"
else
    line "free disk here" "low: $free_mib MiB; the build and the quickstart need 1 GiB"
fi
locked=$(ulimit -l)
if [ "$locked" = unlimited ]; then
    line "locked memory" "ok unlimited"
else
    line "locked memory" "limit $locked KiB (matters with InfiniBand: ulimit -l unlimited)"
fi

say "== the GPU program (not needed for the CPU program) =="
# Searches the same places as the Makefile: folders given by variables, the toolkit, the system,
# NVIDIA's Python packages.
lacks=() # missing requirements of the GPU program
too_old() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a + 0 < b + 0) }'; } # VERSION LEAST
triple=$(gcc -dumpmachine 2>/dev/null)
if [ -z "${CUDA_HOME:-}" ]; then
    CUDA_HOME=$(command -v nvcc)
    CUDA_HOME=${CUDA_HOME%/bin/nvcc}
    for folder in /usr/local/cuda /opt/cuda; do
        [ -n "$CUDA_HOME" ] || [ ! -e "$folder" ] || CUDA_HOME=$folder
    done
fi
toolkit=$([ -z "$CUDA_HOME" ] ||
    "$CUDA_HOME/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
if [ -z "$toolkit" ]; then
    line "CUDA compiler" "missing: no nvcc${CUDA_HOME:+ in $CUDA_HOME/bin} \
(cuda-toolkit 12.0 or newer, or CUDA_HOME=)"
    lacks+=("the CUDA toolkit")
elif too_old "$toolkit" 12.0; then
    line "CUDA compiler" "too old: $toolkit in $CUDA_HOME; 12.0 or newer is needed"
    lacks+=("a newer CUDA toolkit")
else
    line "CUDA compiler" "ok $toolkit ($CUDA_HOME)"
fi

mapfile -t packages < <(python3 -c 'import nvidia, os
for p in nvidia.__path__: print(os.path.dirname(p))' 2>/dev/null)
roots=()
for folder in "${NCCL_HOME:-}" "${CUDNN_HOME:-}" "$CUDA_HOME" /usr /usr/local; do
    [ -z "$folder" ] || roots+=("$folder")
done
for package in ${packages[@]+"${packages[@]}"}; do
    for folder in "$package"/nvidia/*; do [ ! -d "$folder" ] || roots+=("$folder"); done
done

# find_file NAME FOLDERS...: prints the first match.
find_file() {
    local name=$1 folder found
    shift
    for folder; do
        for found in "$folder"/$name; do [ ! -e "$found" ] || { say "$found"; return; }; done
    done
}
defined() { sed -n "s/^#define $2 *\([0-9]*\).*/\1/p" "$1" 2>/dev/null | head -n 1; } # HEADER NAME

# library_line NAME HOME-VARIABLE HEADER LIBRARY VERSION-HEADER PREFIX PACKAGE
library_line() {
    local header library folder where=() home=${!2:-} version
    if [ -n "$home" ] && [ ! -e "$home/include/$3" ]; then
        line "$1" "wrong: $2=$home has no include/$3"
        lacks+=("$1")
        return
    fi
    for folder in "${roots[@]}"; do where+=("$folder/lib64" "$folder/lib" "$folder/lib/$triple"); done
    header=$(find_file "$3" "${roots[@]/%//include}" "/usr/include/$triple")
    library=$(find_file "lib$4.so*" "${where[@]}")
    version=$(dirname "${header:-/}")/$5
    version=$(defined "$version" "$6_MAJOR").$(defined "$version" "$6_MINOR")
    if [ -n "$header" ] && [ -n "$library" ]; then
        line "$1" "ok $version ($header, $library)"
    else
        line "$1" "missing: ${header:-no $3}, ${library:-no lib$4.so} ($7, or $2=)"
        lacks+=("$1")
    fi
}
major=${toolkit%%.*}
library_line NCCL NCCL_HOME nccl.h nccl nccl.h NCCL \
    "libnccl-dev or the Python package nvidia-nccl-cu$major"
library_line cuDNN CUDNN_HOME cudnn.h cudnn cudnn_version.h CUDNN \
    "libcudnn9-dev-cuda-$major or the Python package nvidia-cudnn-cu$major"
frontend=$(find_file cudnn_frontend.h ${CUDNN_FRONTEND:+"$CUDNN_FRONTEND"} /usr/include /usr/local/include \
    ${packages[@]+"${packages[@]/%//include}"} "$BUILD/cudnn-frontend/include")
if [ -n "${CUDNN_FRONTEND:-}" ] && [ "$frontend" != "$CUDNN_FRONTEND/cudnn_frontend.h" ]; then
    line cudnn-frontend "wrong: CUDNN_FRONTEND=$CUDNN_FRONTEND has no cudnn_frontend.h"
    lacks+=(cudnn-frontend)
elif [ -n "$frontend" ]; then
    line cudnn-frontend "ok ($frontend)"
elif python3 -m pip --version >/dev/null 2>&1; then
    line cudnn-frontend "not installed; make gpu fetches it with pip (offline: set CUDNN_FRONTEND=)"
else
    line cudnn-frontend "missing, and no pip to fetch it (install python3-pip, or set CUDNN_FRONTEND=)"
    lacks+=(cudnn-frontend)
fi

usable=0 # GPUs
if ! have_command nvidia-smi; then
    line driver "missing (nvidia-driver)"
    line GPU none
elif ! gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap \
    --format=csv,noheader 2>&1) || [ -z "$gpus" ]; then
    line driver "does not answer: $(head -n 1 <<<"${gpus:-nvidia-smi prints nothing}")"
    line GPU none
else
    usable=1
    supports=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1)
    driver=$(head -n 1 <<<"$gpus" | cut -d , -f 2 | tr -d ' ')
    if [ -n "$toolkit" ] && [ -n "$supports" ] && [ "${supports%%.*}" -lt "${toolkit%%.*}" ]; then
        line driver "too old: $driver supports CUDA $supports, the toolkit is $toolkit; \
install a newer driver or an older toolkit"
        usable=0
    else
        line driver "ok $driver (CUDA ${supports:-unknown})"
    fi
    while IFS=, read -r number name memory capability; do
        if too_old "$capability" 8.0; then
            line GPU "too old: $number x $name, compute capability$capability; bf16 training needs 8.0"
            usable=0
        else
            line GPU "ok $number x $name,$memory, compute capability$capability"
        fi
    done < <(cut -d , -f 1,3,4 <<<"$gpus" | uniq -c | sed 's/^ *\([0-9]*\) /\1,/')
fi

# Shared libraries of the built programs that are no longer found.
for program in "$BUILD/train_gpt_cpu" "$BUILD/train_gpt"; do
    [ -x "$program" ] || { line "$program" "not built"; continue; }
    lost=$(ldd "$program" 2>/dev/null | awk '/not found/ {printf " %s", $1}')
    if [ -z "$lost" ]; then
        line "$program" "ok, finds its libraries"
    else
        line "$program" "does not find$lost; reinstall them, add their folders to LD_LIBRARY_PATH, \
or rebuild"
    fi
done

# OpenBLAS may choose kernels without AVX2 on CPUs newer than itself.
kernels=$("$BUILD/train_gpt_cpu" --version 2>/dev/null | sed -n 's/.*, kernels \([A-Za-z0-9]*\).*/\1/p')
case $kernels in
'') ;;
Prescott | Core2 | Penryn | Dunnington | Nehalem | Atom | Generic | Opteron* | Barcelona | Bobcat | Athlon)
    line "OpenBLAS kernels" "slow: $kernels, without AVX2; export OPENBLAS_CORETYPE=Haswell" ;;
*) line "OpenBLAS kernels" "ok $kernels" ;;
esac

if [ $broken = 0 ]; then
    say "The CPU program can be built here."
else
    say "The CPU program cannot be built here yet; scripts/quickstart.sh installs what is missing."
fi
if [ $broken != 0 ] || [ ${#lacks[@]} != 0 ]; then
    missing=$(IFS=,; echo "${lacks[*]}" | sed 's/,/, /g')
    say "The GPU program cannot be built here yet${lacks[*]+; missing: $missing}."
elif [ $usable = 0 ]; then
    say "The GPU program can be built here, but there is no GPU that can run it."
else
    say "The GPU program can be built and run here."
fi
[ $broken = 0 ] || exit 3
