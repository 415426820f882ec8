#!/bin/bash
# Reads event files with TensorBoard's package and compares scalars, steps and texts. If python3 has
# no tensorboard package, the files are only written, and the test is skipped (exit code 77). PYTHON
# selects another interpreter.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/write.c" <<'END'
#include <math.h>
#include <stddef.h>
#include "llmc/log/tensorboard.h"
int main(int argc, char **argv) {
    Tensorboard *tb = tensorboard_open(argv[1], NULL);
    if (!tb) return 1;
    for (int i = 0; i <= 1000; i++) tensorboard_scalar(tb, "lm loss", i, 10.0 / (1 + i));
    tensorboard_scalar(tb, "lm loss vs samples", (int64_t)1 << 40, 0.0);
    tensorboard_scalar(tb, "grad-norm", 3, NAN);
    tensorboard_text(tb, "split/text_summary", 0, "969, 30, 1 \xc3\xa9");
    tensorboard_close(tb);
    return 0;
}
END
"${MPICC:-mpicc}" -std=c11 -D_GNU_SOURCE -I. "$folder/write.c" "${BUILD:-build}/libllmc.a" -lcjson -lxxhash \
    -lpcre2-8 -lpthread -lm -o "$folder/write"
"$folder/write" "$folder/events"

python=${PYTHON:-python3}
if ! "$python" -c 'from tensorboard.backend.event_processing import event_accumulator' 2>/dev/null; then
    echo "skipped: $python has no tensorboard package"
    exit 77
fi

"$python" - "$folder/events" <<'END'
import math, struct, sys
from tensorboard.backend.event_processing import event_accumulator as ea
events = ea.EventAccumulator(sys.argv[1], size_guidance={ea.SCALARS: 0, ea.TENSORS: 0})
events.Reload()
single = lambda x: struct.unpack("f", struct.pack("f", x))[0]
assert events.Tags()["scalars"] == ["lm loss", "lm loss vs samples", "grad-norm"], events.Tags()
loss = events.Scalars("lm loss")
assert [e.step for e in loss] == list(range(1001))
assert all(e.value == single(10.0 / (1 + e.step)) for e in loss)
assert abs(loss[0].wall_time - __import__("time").time()) < 600
assert [(e.step, e.value) for e in events.Scalars("lm loss vs samples")] == [(1 << 40, 0.0)]
assert math.isnan(events.Scalars("grad-norm")[0].value)
assert events.SummaryMetadata("split/text_summary").plugin_data.plugin_name == "text"
text = events.Tensors("split/text_summary")[0].tensor_proto
assert list(text.string_val) == ["969, 30, 1 \u00e9".encode()]
assert [d.size for d in text.tensor_shape.dim] == [1]
print("tensorboard: 1003 scalars and one text read back by the package")
END
