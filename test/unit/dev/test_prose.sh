#!/usr/bin/env bash
# Tests dev/data/prose_filter.py: which paragraphs count as prose, reading each kind of file,
# dropped and repeated paragraphs, and an order that does not depend on file names. Also runs
# dev/data/prose.sh with packages that this test builds. Prints "ok NAME" and "not ok NAME".
set -u
cd "$(dirname "$0")/../../.." || exit 1
. test/results.sh
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
doc=$work/tree/alpha/usr/share/doc/alpha
mkdir -p "$doc/html/de" "$work/tree/beta/usr/share/dictd" "$work/tree/beta/usr/share/doc/beta"
a='The quick fox is at the door, and it will not go away until you have given it some of the bread.'
# filler NAME: prints a paragraph that makes a file long enough.
filler() {
    local number
    for number in one two three four five six seven; do
        printf 'This is what the filler of %s has to say to all of you as number %s. ' "$1" $number
    done
}
b='She said that the letter was not for him: it had been sent to the house by mistake.'
cat >"$doc/html/page.html" <<END
<html><head><title>The title of the page is not in the text, as it is only one.</title></head><body>
<nav><p>This is the navigation that you see on all of the pages, and it is not text.</p></nav>
<p>The quick <b>fox</b> is at the door,
and it will not go away until you have
given it some of the bread.</p>
<pre>if the value of this is in the set, it is for you to return it.</pre>
<p>int main(int argc, char **argv) { return the_value_of(argc, argv[0], 0x7f); } /* the of and to */</p>
<ul><li>Short one.<li>It is the list of all that was left for us, and we have not read it.</ul>
<p>$(filler page)</p></body></html>
END
echo "<p>It is on this page that you have one sentence, and that is all of it.</p>" >"$doc/html/short.html"
echo "<p>$a Und das ist der Text, den es in der anderen Sprache to the of and gibt.</p>" >"$doc/html/de/page.html"
cp "$doc/html/de/page.html" "$doc/html/page.de.html"
printf '%s\n\nLe renard est dans la maison, et il ne veut pas partir avant de manger le pain.\n\n%s\n' \
    "$a" "$(filler notes)" |
    gzip >"$doc/notes.txt.gz"
printf '=head1 NAME\n\nThe B<value> of C<$x> is in the list, as L<the manual|perlop> has it for you.\n\n%s\n' \
    "$(filler pod)" >"$work/tree/beta/usr/share/doc/beta/page.pod"
printf 'fox\n   %s\nletter\n   A message that is written on paper, and that is sent to one who is not at hand.\nfiller\n   %s\n' \
    "$b" "$(filler dictionary)" |
    gzip >"$work/tree/beta/usr/share/dictd/small.dict.dz"
printf '\x1f\x8b broken' >"$work/tree/beta/usr/share/doc/beta/broken.txt.gz"
ln -s page.pod "$work/tree/beta/usr/share/doc/beta/again.pod"
dev/data/prose_filter.py "$work/tree" >"$work/out" 2>"$work/err" ||
    not_ok "the filter runs" "$(tail -n 1 "$work/err")"
python3 - "$work/out" "$a" "$b" <<'END' || failed=1
import hashlib, json, sys
failures = 0
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
paragraphs = [p for text in texts for p in text.rstrip("\n").split("\n\n") if "filler" not in p]
def same(name, found, wanted):
    global failures
    failures += found != wanted
    print(f"ok {name}" if found == wanted else f"not ok {name}: {found} instead of {wanted}")
same("every paragraph of prose occurs once", sorted(paragraphs), sorted([
    sys.argv[2], "It is the list of all that was left for us, and we have not read it.",
    "The value of $x is in the list, as the manual has it for you.", "fox " + sys.argv[3],
    "letter A message that is written on paper, and that is sent to one who is not at hand."]))
keys = [hashlib.md5(text.encode()).hexdigest() for text in texts]
same("documents in the order of their hashes", keys, sorted(keys))
sys.path.insert(0, "dev/data")
sys.dont_write_bytecode = True
import prose_filter
long = [f"It is the {'very ' * n}long one that is for you." for n in range(1, 400)]
documents = list(prose_filter.documents_of(long))
same("long files are cut", [len(documents) > 10, max(map(len, documents)) < 20000,
                           "".join(documents).count("\n")], [True, True, 2 * 399 - len(documents)])
raise SystemExit(failures > 0)
END
says() { if grep -qF "$2" "$work/err"; then ok "$1"; else not_ok "$1" "$(tail -n 1 "$work/err")"; fi; }
says "a file that cannot be read is reported" "broken.txt.gz: "
says "each package is listed" "alpha  "

# --- the script, with packages built here ---
if [ -x "${BUILD:-build}/preprocess_data" ] && command -v dpkg-deb >/dev/null; then
    export BUILD=${BUILD:-build}
    case $BUILD in /*) ;; *) BUILD=$PWD/$BUILD ;; esac
    mkdir -p "$work/tree/alpha/DEBIAN" "$work/packages/debs"
    printf 'Package: alpha\nVersion: 1\nArchitecture: all\nMaintainer: none\nDescription: none\n' \
        >"$work/tree/alpha/DEBIAN/control"
    dpkg-deb -b "$work/tree/alpha" "$work/packages/debs/alpha_1_all.deb" >/dev/null 2>"$work/err"
    if dev/data/prose.sh --packages "alpha no-such-package-here" --work "$work/packages" \
        --output-prefix "$work/made" --tokenizer-type Byte >"$work/out" 2>&1 &&
        [ -s "$work/made_text_document.bin" ] && grep -q '^no-such-package-here: not available' "$work/out"; then
        ok "a shard from packages"
    else
        not_ok "a shard from packages" "$(tail -n 1 "$work/out")"
    fi
else
    skip "a shard from packages" "preprocess_data is not built, or dpkg-deb is missing"
fi
finish
