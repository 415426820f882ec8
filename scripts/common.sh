# shellcheck shell=bash
# Shell functions that the scripts here, in dev/ and in test/ share: help, what the programs need
# and how to install it, the number of cores, the flags of a command, how to start ranks. Sourcing
# it goes to the root of the repository.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 3
BUILD=${BUILD:-build}

say() { printf '%s\n' "$*"; }
die() { # code, what; what to do
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}

# make_folder FOLDER: for output. Asked for before the work, not hours later.
make_folder() {
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ] ||
        die 3 "the folder $1 cannot be made or written; choose another one"
}

# help_if_asked SCRIPT WORDS...: with --help or -h among the words prints the comment that heads the
# script, a path from the root, and leaves.
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

# --- what is needed ---------------------------------------------------------------------

have_command() { command -v "$1" >/dev/null 2>&1; }

debian_package_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

c_compiler() { if have_command "${CC:-cc}"; then echo "${CC:-cc}"; else echo gcc; fi; }

# have_library HEADER LINKER-FLAG PACKAGE [PKG-CONFIG-NAME]: can a program be built with it? Without
# a compiler Debian's records answer.
have_library() {
    local program flags='' status=1
    have_command "$(c_compiler)" || { debian_package_installed "$3"; return; }
    [ $# -lt 4 ] || flags=$(pkg-config --cflags --libs "$4" 2>/dev/null)
    program=$(mktemp) || return 1
    # shellcheck disable=SC2086  # flags are several words
    if {
        printf '#include <%s>\n' stdarg.h setjmp.h stddef.h stdint.h # what cmocka.h wants before it
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

# One line per requirement: for whom it is (run: building and running; test: the tests), its name,
# Debian packages, the command that looks for it.
requirements() {
    cat <<'END'
run |C compiler|gcc libc6-dev|have_c
run |make|make|have_command make
run |pkg-config|pkg-config|have_command pkg-config
run |MPI compiler|libopenmpi-dev|have_command mpicc
run |mpirun|openmpi-bin|have_command mpirun
run |OpenBLAS|libopenblas-dev|have_library cblas.h -lopenblas libopenblas-dev openblas
run |cJSON|libcjson-dev|have_library cjson/cJSON.h -lcjson libcjson-dev libcjson
run |xxHash|libxxhash-dev|have_library xxhash.h -lxxhash libxxhash-dev
run |PCRE2|libpcre2-dev|have_library pcre2.h -lpcre2-8 libpcre2-dev
run |Python 3|python3|have_command python3
test|C++ compiler|g++|have_command g++
test|cmocka|libcmocka-dev|have_library cmocka.h -lcmocka libcmocka-dev
END
}

# missing WHO...: "name|packages" of what is not there.
missing() {
    local who name packages probe
    while IFS='|' read -r who name packages probe; do
        case " $* " in *" ${who% } "*) ;; *) continue ;; esac
        # shellcheck disable=SC2086  # the probe is a command line of this file
        $probe </dev/null || say "$name|$packages"
    done < <(requirements)
}

# install_missing NO_INSTALL WHO...: names what is missing and installs it with apt. With
# NO_INSTALL=1 it names it and leaves.
install_missing() {
    local no_install=$1 lacking packages install log sudo=()
    shift
    lacking=$(missing "$@")
    [ -n "$lacking" ] || return 0
    packages=$(cut -d '|' -f 2 <<<"$lacking" | tr '\n' ' ')
    say "missing: $(cut -d '|' -f 1 <<<"$lacking" | paste -s -d ',' | sed 's/,/, /g')"
    install="apt-get install --no-install-recommends $packages"
    have_command apt-get ||
        die 3 "this machine has no apt-get; install them in its own way: on Debian the packages are $packages"
    [ "$no_install" = 0 ] || die 3 "--no-install was given; install them with: $install"
    if [ "$(id -u)" != 0 ]; then
        have_command sudo || die 3 "installing needs root or sudo; run as root: $install"
        sudo=(sudo)
    fi
    mkdir -p "$BUILD"
    log=$BUILD/install.log
    say "installing (log in $log): $packages"
    # shellcheck disable=SC2086  # packages are several words
    if ! "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive sh -c 'apt-get -o Acquire::Retries=3 update &&
        apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
            install --yes --no-install-recommends "$@"' sh $packages </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die 3 "apt-get could not install the packages; see $log"
    fi
    hash -r
    lacking=$(missing "$@")
    lacking=$(cut -d '|' -f 1 <<<"$lacking" | paste -s -d ',')
    [ -z "$lacking" ] || die 3 "still missing after installation: $lacking; see $log"
}

# --- cores ------------------------------------------------------------------------------

# Processors that this process may use: its affinity, and a container's quota rounded up.
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

# read_words WORDS...: sets $words to them, with the words of its file in place of each @file. Files
# are read as the trainer reads them (llmc/config/options.c). Blanks part words, and # begins a
# comment where a word could begin. Quotes and backslashes are those of a shell. A file inside a
# file is relative to its folder. What the trainer refuses is left to it: a file that cannot be read
# gives no words, and one ends at a quote that is not closed.
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

# has_flag NAME: is one of $words this flag?
has_flag() {
    local word
    for word in ${words[@]+"${words[@]}"}; do case $word in "$1" | "$1="*) return 0 ;; esac; done
    return 1
}

# last_value NAME: sets $value to the flag's last value in $words, which counts in the trainer too.
# It is empty without one.
last_value() {
    local i
    value=
    for ((i = 0; i < ${#words[@]}; i++)); do
        case ${words[i]} in "$1") value=${words[i + 1]:-} ;; "$1="*) value=${words[i]#*=} ;; esac
    done
}

# --- ranks ------------------------------------------------------------------------------

# Standard error without mpirun's blocks about ranks that have ended: the programs print one line of
# their own. Its other blocks stay, which mpirun -q of Open MPI 4 would hide too, as that there are
# too few slots. Open MPI 5 has no such flag.
without_banners() {
    local line block='' inside=0 known=0
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ ^-{60,}$ ]]; then
            if [ $inside = 0 ]; then
                inside=1 known=0 block=$line
            else
                inside=0
                [ $known = 1 ] || printf '%s\n' "$block" "$line"
            fi
        elif [ $inside = 1 ]; then
            block+=$'\n'$line
            case $line in
            *'exited with non-zero status'* | *'MPI_ABORT was invoked'* | 'Primary job '*) known=1 ;;
            *'has exited due to process'* | *'noticed that process'*) known=1 ;;
            esac
        elif [[ $line =~ [^[:blank:]] ]]; then
            printf '%s\n' "$line"
        fi
    done
    [ $inside = 0 ] || [ $known = 1 ] || printf '%s\n' "$block"
}

# One machine needs no TCP, whose search for interfaces warns where there are none. Most containers
# refuse single-copy transfers, with a warning. And it needs no agent that starts ranks elsewhere:
# mpirun ends for want of one where neither ssh nor rsh is installed.
one_machine() {
    if ! command -v ssh rsh >/dev/null; then export OMPI_MCA_plm="${OMPI_MCA_plm-isolated}"; fi
    export OMPI_MCA_btl="${OMPI_MCA_btl-^tcp}"
    export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism-none}"
}

# say_signal STATUS: one line where a job's exit status says that a signal ended a rank.
say_signal() {
    case $(kill -l "$1" 2>/dev/null) in
    ILL | TRAP | ABRT | BUS | FPE | KILL | SEGV | TERM)
        [ "$1" -le 128 ] || say "error: a rank was ended by SIG$(kill -l "$1")" >&2 ;;
    esac
}

# launch RANKS COMMAND...: the command on that many ranks of this machine, without standard input.
# Returns the ranks' exit code.
launch() {
    local ranks=$1 status options=()
    shift
    if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
        # Ranks may outnumber the cores, and several jobs may share them.
        options=(--oversubscribe --bind-to none)
        [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
        one_machine
    fi
    {
        mpirun "${options[@]}" -np "$ranks" "$@" </dev/null 2>&1 >&3 | without_banners >&2
        status=${PIPESTATUS[0]}
    } 3>&1
    say_signal "$status"
    return "$status"
}
