// Undoes the tokenization of evaluation texts, as Megatron-LM's tasks/zeroshot_gpt does. Called by
// llmc/data/task_text.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// WikiText: removes the spaces that its word tokenizer added around punctuation, number separators,
// brackets, quotes and line ends. Changes `text` (UTF-8) in place and returns its new length.
size_t detokenize_wikitext(char *text, size_t bytes);

LLMC_END
