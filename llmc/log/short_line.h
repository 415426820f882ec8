// The short iteration line (--log-line short): step, loss, norm, learning rate, speed, MFU, time
// left.
#pragma once
#include "llmc/log/step_report.h"
LLMC_BEGIN
// Formats a line without newline: "step   1200/80000 | loss 3.1234 | norm 0.512 | lr 5.98e-04 |
// 105,234 tokens/s | MFU 45.1 % | ETA 1h02m". Unknown values and a zero count of skipped iterations
// are omitted.
void short_line(char *out, size_t bytes, const IntervalReport *report);
// Formats a duration as "1h02m", "3d04h" or "58s": the two largest units; "" if unknown.
void short_duration(char *out, size_t bytes, double seconds);
LLMC_END
