// The iteration line for people (--log-line short): step, loss, norm, learning rate, speed, MFU,
// time left. Called by log.c.
#pragma once
#include "llmc/log/report.h"
LLMC_BEGIN
// Without a newline: "step   1200/80000 | loss 3.1234 | norm 0.512 | lr 5.98e-04 | 105,234 tokens/s
// | MFU 45.1 % | ETA 1h02m". What is not known is left out. Skipped iterations are named only when
// there are some.
void short_line(char *out, size_t bytes, const IntervalReport *report);
// "1h02m", "3d04h", "58s": two units, the largest that apply; "" when unknown.
void short_duration(char *out, size_t bytes, double seconds);
LLMC_END
