#!/usr/bin/env bash
# The Dockerfiles run the commands of "Install by hand" in README.md.
# shellcheck disable=SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../../.." || exit 1
# shellcheck source-path=SCRIPTDIR source=../../results.sh
. test/results.sh

# Prints commands one per line, without comments and repeated blanks.
one_line_each() { sed -e ':a;/\\$/{N;s/\\\n//;ba}' -e 's/  *#.*//' -e 's/  */ /g' -e 's/ $//'; }
# readme BEGINNING...: prints the commands of the paragraphs that begin with the given words.
readme() {
    local beginning
    for beginning; do
        awk -v beginning="**$beginning" 'index($0, beginning) == 1 { inside = 1 }
            inside && /^    / { printed = 1; sub(/^    /, ""); print; next }
            inside && printed { exit }' README.md
    done | one_line_each | sed 's/^sudo //'
}
dockerfile() { # FILE
    one_line_each <"$1" | sed -n 's/^RUN //p' | grep -v '^apt-get update$' | sed 's/ --yes / /'
}
same_commands() { # FILE BEGINNING...
    local file=$1 difference
    shift
    [ "$(readme "$@" | wc -l)" -ge $((2 * $#)) ] || { why="no commands found in the README"; return 1; }
    difference=$(diff <(readme "$@" | sort) <(dockerfile "$file" | sort)) || { why=$difference; return 1; }
}
check "Dockerfile runs the README's commands" same_commands Dockerfile "CPU programs."
check "Dockerfile.gpu runs the README's commands" same_commands Dockerfile.gpu "CPU programs." "GPU programs."
finish
