#!/usr/bin/env bash
# Looks at this machine: what the CPU program, the tests and the GPU program need, one line each. Changes nothing. Exit code 0 when the
# CPU program can be built and started, 3 when not.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [ $# -gt 0 ]; then
    sed -n '2,3s/^# //p' "scripts/doctor.sh"
    [ "$1" = --help ] && exit 0
    die 2 "unknown argument $1; doctor.sh takes none"
fi

broken=0
line() { printf '%-24s %s\n' "$1" "$2"; } # name, verdict
first_line() { head -n 1 | tr -s ' '; }

# The version of a requirement that is there.
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
    cmocka) pkg-config --modversion cmocka 2>/dev/null ;;
    "Python 3") python3 --version ;;
    esac
}

say "== the CPU program and its tests =="
while IFS='|' read -r who name packages probe; do
    # shellcheck disable=SC2086  # the probe is a command line
    if $probe </dev/null; then
        line "$name" "ok $(version_of "$name")"
    else
        line "$name" "missing ($packages)"
        [ "${who% }" = test ] || broken=1
    fi
done < <(requirements)

# Two ranks that do nothing.
if ! have_command mpirun; then
    line "mpirun with 2 ranks" "not tried"
elif output=$(launch 2 true 2>&1); then
    line "mpirun with 2 ranks" ok
else
    line "mpirun with 2 ranks" "fails: $(tail -n 1 <<<"$output")"
    broken=1
fi
line cores "ok $(core_count)"
free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
if [ "$free_mib" -ge 1024 ]; then line "free disk here" "ok $((free_mib / 1024)) GiB"; else line "free disk here" "low: $free_mib MiB; the build and the quickstart want 1 GiB"; fi
line "locked memory" "$(l=$(ulimit -l); [ "$l" = unlimited ] && echo ok unlimited || echo "limit $l KiB (matters with InfiniBand: ulimit -l unlimited)")"

say "== the GPU program (not needed for the CPU program) =="
nvcc_path=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
if [ -n "$nvcc_path" ]; then line "CUDA compiler" "ok $("$nvcc_path" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') ($nvcc_path)"; else line "CUDA compiler" "missing (cuda-toolkit)"; fi

# header_of NAME HEADER VERSION-PREFIX PACKAGE: a header under /usr/include, the CUDA toolkit, or a folder of CPATH.
header_of() {
    local folder found=''
    for folder in ${CPATH//:/ } /usr/include "/usr/include/$(uname -m)-linux-gnu" "${CUDA_HOME:-/usr/local/cuda}/include" /usr/local/include; do
        [ -z "$found" ] && [ -e "$folder/$2" ] && found=$folder/$2
    done
    if [ -n "$found" ]; then line "$1" "ok ($found)"; else line "$1" "missing ($3)"; fi
}
header_of NCCL nccl.h libnccl-dev
header_of cuDNN cudnn.h libcudnn9-dev-cuda-12
header_of cudnn-frontend cudnn_frontend.h "headers only: NVIDIA's cudnn-frontend"
if have_command nvidia-smi && gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null) && [ -n "$gpus" ]; then
    line driver "ok $(head -n 1 <<<"$gpus" | cut -d ',' -f 2 | tr -d ' ')"
    line GPU "ok $(wc -l <<<"$gpus") x $(head -n 1 <<<"$gpus" | cut -d ',' -f 1)"
else
    line driver "missing (nvidia-driver)"
    line GPU none
fi

if [ $broken = 0 ]; then say "The CPU program can be built here."; else say "The CPU program cannot be built here yet; scripts/quickstart.sh installs what is missing."; fi
[ $broken = 0 ] || exit 3
