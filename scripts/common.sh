# shellcheck shell=bash
# Shell functions shared by the scripts here, in dev/ and in test/: --help, requirements and their
# installation, CPU cores, flags of a command, starting ranks. Sourcing this file changes to the
# root of the repository.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 3
BUILD=${BUILD:-build}

say() { printf '%s\n' "$*"; }
die() { # CODE MESSAGE; the message says what failed and what to do
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}

# make_folder FOLDER: creates an output folder and checks that it is writable, before the work
# starts.
make_folder() {
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ] ||
        die 3 "cannot create or write to the folder $1; choose another one"
}

# help_if_asked SCRIPT WORDS...: if the words contain --help or -h, prints the header comment of
# SCRIPT (a path relative to the root) and exits.
help_if_asked() {
    local script=$1 word
    shift
    for word; do
        case $word in --help | -h)
            sed -n '2,/^[^#]/{/^# shellcheck /d; /^#/!d; s/^# \{0,1\}//p}' "$script"
            exit 0 ;;
        esac
    done
}

# --- requirements ------------------------------------------------------------------------

have_command() { command -v "$1" >/dev/null 2>&1; }

debian_package_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

c_compiler() { if have_command "${CC:-cc}"; then echo "${CC:-cc}"; else echo gcc; fi; }

# have_library HEADER LINKER-FLAG PACKAGE [PKG-CONFIG-NAME]: checks that a program can be built with
# the library. Without a compiler, checks that the Debian package is installed.
have_library() {
    local program flags='' status=1
    have_command "$(c_compiler)" || { debian_package_installed "$3"; return; }
    [ $# -lt 4 ] || flags=$(pkg-config --cflags --libs "$4" 2>/dev/null)
    program=$(mktemp) || return 1
    # shellcheck disable=SC2086 # split on purpose
    if {
        printf '#include <%s>\n' stdarg.h setjmp.h stddef.h stdint.h # cmocka.h needs these first
        printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <%s>\nint main(void) { return 0; }\n' "$1"
    } | "$(c_compiler)" -x c - -x none $flags "$2" -o "$program" 2>/dev/null; then
        status=0
    fi
    rm -f "$program"
    return $status
}

have_c() {
    local program status=1
    have_command "$(c_compiler)" || return 1
    program=$(mktemp) || return 1
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' |
        "$(c_compiler)" -x c - -o "$program" 2>/dev/null && status=0
    rm -f "$program"
    return $status
}

# One line per requirement: purpose (build, run, or test for the tests), name, Debian
# packages, command that checks for it.
requirements() {
    cat <<'END'
build|C compiler|gcc libc6-dev|have_c
build|make|make|have_command make
build|pkg-config|pkg-config|have_command pkg-config
build|MPI compiler|libopenmpi-dev|have_command mpicc
run  |mpirun|openmpi-bin|have_command mpirun
build|OpenBLAS|libopenblas-dev|have_library cblas.h -lopenblas libopenblas-dev openblas
build|cJSON|libcjson-dev|have_library cjson/cJSON.h -lcjson libcjson-dev libcjson
build|xxHash|libxxhash-dev|have_library xxhash.h -lxxhash libxxhash-dev
build|PCRE2|libpcre2-dev|have_library pcre2.h -lpcre2-8 libpcre2-dev
build|utf8proc|libutf8proc-dev|have_library utf8proc.h -lutf8proc libutf8proc-dev
build|liburing|liburing-dev|have_library liburing.h -luring liburing-dev
build|ZeroMQ|libzmq3-dev|have_library zmq.h -lzmq libzmq3-dev
run  |Python 3|python3|have_command python3
test |C++ compiler|g++|have_command g++
test |cmocka|libcmocka-dev|have_library cmocka.h -lcmocka libcmocka-dev
END
}

# missing PURPOSE...: prints "name|packages" for every missing requirement.
missing() {
    local who name packages check
    while IFS='|' read -r who name packages check; do
        case " $* " in *" ${who%% *} "*) ;; *) continue ;; esac
        # shellcheck disable=SC2086 # split on purpose
        $check </dev/null || say "$name|$packages"
    done < <(requirements)
}

# Reads the output of apt-get install, and prints how far it is.
apt_progress() {
    awk '/^Need to get / { print "  downloading " $4 " " $5; fflush() }
        / newly installed, / { total = 2 * ($1 + $3) }
        /^(Unpacking|Setting up) / && total && ++done % int(total / 10 + 1) == 0 {
            printf "  installed %d %%\n", 100 * done / total
            fflush()
        }'
}

# install_missing NO_INSTALL PURPOSE...: prints the missing requirements and installs them with apt.
# With NO_INSTALL=1 it exits instead of installing.
install_missing() {
    local no_install=$1 lacking packages install log sudo=()
    shift
    lacking=$(missing "$@")
    [ -n "$lacking" ] || return 0
    packages=$(cut -d '|' -f 2 <<<"$lacking" | tr '\n' ' ')
    say "missing: $(cut -d '|' -f 1 <<<"$lacking" | paste -s -d ',' | sed 's/,/, /g')"
    install="apt-get install --no-install-recommends $packages"
    have_command apt-get ||
        die 3 "apt-get was not found; install them with your package manager (Debian packages: $packages)"
    [ "$no_install" = 0 ] || die 3 "--no-install was given; install them with: $install"
    if [ "$(id -u)" != 0 ]; then
        have_command sudo || die 3 "installing requires root or sudo; run as root: $install"
        sudo=(sudo)
    fi
    mkdir -p "$BUILD"
    log=$BUILD/install.log
    say "installing (log in $log): $packages"
    # shellcheck disable=SC2086 # split on purpose
    if ! (
        set -o pipefail
        "${sudo[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive sh -c '
            apt-get -o Acquire::Retries=3 update &&
            apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
                install --yes --no-install-recommends "$@"' sh $packages </dev/null 2>&1 |
            tee "$log" | apt_progress
    ); then
        tail -n 20 "$log" >&2
        die 3 "apt-get could not install the packages; see $log"
    fi
    hash -r
    lacking=$(missing "$@")
    lacking=$(cut -d '|' -f 1 <<<"$lacking" | paste -s -d ',')
    [ -z "$lacking" ] || die 3 "still missing after installation: $lacking; see $log"
}

# --- cores ------------------------------------------------------------------------------

# Prints the number of CPU cores available to this process: its affinity mask, limited by a
# container's quota (rounded up).
core_count() {
    local n quota period
    n=$(nproc)
    if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
        quota=$(((quota + period - 1) / period))
        [ "$quota" -ge "$n" ] || n=$quota
    fi
    say "$n"
}

# --- flags ------------------------------------------------------------------------------

# read_words WORDS...: sets $words to WORDS with every @file replaced by the words in that file.
# Files are parsed as in the trainer (llmc/config/options.c): words are separated by white space, #
# at the start of a word begins a comment, and quotes and backslashes work as in a shell. An @file
# in a file is relative to that file's folder. Errors are left to the trainer: an unreadable file
# gives no words, and an unclosed quote ends the file.
read_words() {
    mapfile -d '' -t words < <(LC_ALL=C awk -- '
        function is_blank(c) { return c != "" && index(" \t\n\v\f\r", c) > 0 }
        function add_word(word) { printf "%s%c", word, 0 }
        function add_file(path, depth,    text, line, i, n, c, quote, word, bare, name) {
            if (depth > 8 || ++files > 64) return
            while ((getline line < path) > 0) text = text line "\n"
            close(path)
            n = length(text)
            for (i = substr(text, 1, 3) == "\357\273\277" ? 4 : 1; i <= n; ) {
                c = substr(text, i, 1)
                if (c == "#") while (i <= n && substr(text, i, 1) != "\n") i++
                if (c == "#" || is_blank(c)) { i++; continue }
                if (c == "\\" && substr(text, i + 1, 2) ~ /^\r?\n/) { i++; continue }
                bare = index("\"\047\\", c) == 0
                for (word = ""; i <= n && !is_blank(c = substr(text, i, 1)); i++) {
                    if (c == "\"" || c == "\047") {
                        for (quote = c; (c = substr(text, ++i, 1)) != quote; word = word c) {
                            if (i > n) return
                            if (quote != "\"" || c != "\\") continue
                            if (substr(text, i + 1, 1) ~ /["\\]/) c = substr(text, ++i, 1)
                        }
                        continue
                    }
                    if (c == "\\") {
                        c = substr(text, ++i, 1)
                        if (c == "\r" && substr(text, i + 1, 1) == "\n") c = substr(text, ++i, 1)
                        if (c == "\n") break
                    }
                    word = word c
                }
                if (!bare || word !~ /^@/) { add_word(word); continue }
                name = path
                sub(/[^\/]*$/, "", name)
                add_file((word ~ /^@\// ? "" : name) substr(word, 2), depth + 1)
            }
        }
        BEGIN {
            for (k = 1; k < ARGC; k++)
                if (ARGV[k] ~ /^@/) add_file(substr(ARGV[k], 2), 1); else add_word(ARGV[k])
        }' "$@" </dev/null 2>/dev/null)
}

# has_flag NAME: true if $words contains this flag.
has_flag() {
    local word
    for word in ${words[@]+"${words[@]}"}; do case $word in "$1" | "$1="*) return 0 ;; esac; done
    return 1
}

# last_value NAME: sets $value to the last value of the flag in $words (the one that the trainer
# uses), or to an empty string.
last_value() {
    local i
    value=
    for ((i = 0; i < ${#words[@]}; i++)); do
        case ${words[i]} in "$1") value=${words[i + 1]:-} ;; "$1="*) value=${words[i]#*=} ;; esac
    done
}

# --- ranks ------------------------------------------------------------------------------

# oom_kills COMMAND...: prints the number of processes that the kernel's out-of-memory killer ended
# in this cgroup, and its last line in the kernel log about a program named in the command. Prints
# less where these cannot be read.
oom_kills() {
    local word patterns=()
    for word; do
        word=${word##*/}
        patterns+=(-e "(${word:0:15})")
    done
    {
        sed -n 's/^oom_kill //p' \
            "${MEMORY_EVENTS:-/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.events}"
        dmesg | grep 'Killed process' | grep -F ${patterns[@]+"${patterns[@]}"} | tail -n 1
    } 2>/dev/null || true
}

# out_of_memory SIGNAL COMMAND...: prints a remark if the signal is SIGKILL and the kernel recorded
# an out-of-memory kill on this machine since $oom_before was set to the output of oom_kills.
out_of_memory() {
    local now
    [ "$1" = 9 ] || return 0
    shift
    now=$(oom_kills "$@")
    # Old lines can drop out of the kernel log.
    case ${oom_before-} in "$now"*) ;; *) printf ' (probably out of memory)' ;; esac
}

# say_killed_rank RANK NODE SIGNAL-NUMBER COMMAND...: prints an error line.
say_killed_rank() {
    local rank=$1 node=$2 signal=$3 reason='' here
    shift 3
    here=$(uname -n)
    [ "${node%%.*}" != "${here%%.*}" ] || reason=$(out_of_memory "$signal" "$@")
    say "error: rank $rank on $node was killed by SIG$(kill -l "$signal")$reason"
}

# without_banners COMMAND...: filters the messages of the given mpirun command. Replaces the blocks
# about failed ranks by one line that names a killed rank, because the programs print an error line
# themselves before they exit. Other blocks are kept, such as the one about too few slots. Returns 1
# if it printed a block or named a rank. (mpirun -q of Open MPI 4 would hide all of them; Open MPI 5
# has no such flag.)
without_banners() {
    local line block='' inside=0 known=0 status=0
    local killed='process rank ([0-9]+) with PID [0-9]+ on node ([^ ]+) exited on signal ([0-9]+)'
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ ^-{60,}$ ]]; then
            if [ $inside = 0 ]; then
                inside=1 known=0 block=$line
            else
                inside=0
                [ $known = 1 ] || { printf '%s\n' "$block" "$line"; status=1; }
            fi
        elif [ $inside = 1 ]; then
            block+=$'\n'$line
            case $line in
            *'exited with non-zero status'* | *'MPI_ABORT was invoked'* | 'Primary job '*) known=1 ;;
            *'has exited due to process'* | *'noticed that process'*) known=1 ;;
            esac
            if [[ $line =~ $killed ]]; then
                say_killed_rank "${BASH_REMATCH[@]:1}" "$@"
                status=1
            fi
        elif [[ $line =~ [^[:blank:]] ]]; then
            printf '%s\n' "$line"
        fi
    done
    [ $inside = 0 ] || [ $known = 1 ] || { printf '%s\n' "$block"; status=1; }
    return $status
}

# Configures Open MPI for a single machine. Turns off:
#   - the remote launch agent: mpirun fails if neither ssh nor rsh is installed
#   - TCP, which warns on machines without network interfaces
#   - fabric libraries: opening them takes half of the start-up time
#   - the daemon of a program that runs without mpirun
#   - single-copy transfers, which most containers refuse with a warning
one_machine() {
    if ! command -v ssh rsh >/dev/null; then export OMPI_MCA_plm="${OMPI_MCA_plm-isolated}"; fi
    export OMPI_MCA_pml="${OMPI_MCA_pml-ob1}" OMPI_MCA_btl="${OMPI_MCA_btl-^tcp,openib,ofi}"
    export OMPI_MCA_ess_singleton_isolated="${OMPI_MCA_ess_singleton_isolated-1}"
    export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism-none}"
}

# say_signal STATUS COMMAND...: prints an error line if the exit status shows that a signal killed a
# rank. Used if mpirun did not name the rank, which happens when it exits too quickly.
say_signal() {
    case $(kill -l "$1" 2>/dev/null) in
    ILL | TRAP | ABRT | BUS | FPE | KILL | SEGV | TERM)
        [ "$1" -le 128 ] ||
            say "error: a rank was killed by SIG$(kill -l "$1")$(out_of_memory $(($1 - 128)) "${@:2}")" >&2 ;;
    esac
}

# launch RANKS COMMAND...: runs the command with this number of ranks on this machine, without
# standard input. Returns the exit code of the ranks.
launch() {
    local ranks=$1 pipe_status=() options=() oom_before
    shift
    oom_before=$(oom_kills "$@")
    if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
        # Ranks may outnumber the cores, and several jobs may share them.
        options=(--oversubscribe --bind-to none)
        [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
        one_machine
    fi
    {
        mpirun "${options[@]}" -np "$ranks" "$@" </dev/null 2>&1 >&3 | without_banners "$@" >&2 &&
            pipe_status=("${PIPESTATUS[@]}") || pipe_status=("${PIPESTATUS[@]}")
    } 3>&1
    [ "${pipe_status[1]}" != 0 ] || say_signal "${pipe_status[0]}" "$@"
    return "${pipe_status[0]}"
}
