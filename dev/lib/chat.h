// Chat conversations as token ids and loss masks, for supervised fine-tuning. Called by the workers
// of preprocess_data --chat.
//
// A template is data: a row of strings. Its loss mask is 1 on the text of assistant turns and on
// the token that ends them, unless a turn has the weight 0. The text before an assistant turn and
// the turn are encoded separately, so that the boundary is the same as in generation, where the
// prompt ends there.
#pragma once
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

// Text before and after the content of a turn. before NULL: the template has no such role.
typedef struct ChatTurn {
    const char *before, *after;
} ChatTurn;

enum { CHAT_TOKENS = 6 };
typedef struct ChatTemplate {
    const char *name;
    const char *begin;           // text at the start of a conversation
    const char *default_system;  // content of the system turn if there is none; NULL: no such turn
    ChatTurn system, user;
    ChatTurn assistant;   // before: end of the prompt; after: follows the end-of-turn token, no loss
    const char *opening;  // starts the assistant's text, with loss
    // The same in a turn that ends the conversation and follows a user's, whose content then loses
    // leading newlines. NULL: opening.
    const char *final;
    const char *stop;     // end-of-turn token, with loss; NULL: the tokenizer's end-of-document id
    const char *refused;  // text of an assistant turn that the original template rewrites; NULL: none
    bool trims_all, trims_assistant;  // strip white space around contents
    bool alternates;                  // after the system turn, roles must be user, assistant, user, ...
    const char *tokens[CHAT_TOKENS];  // must be single ids of the tokenizer
} ChatTemplate;

// Names of the templates and CHAT_RENDERED, for help and messages.
#define CHAT_NAMES \
    "chatml, qwen2.5, qwen3, llama3, llama3.1, mistral, mistral-nemo, mistral-v7, plain, rendered"
// Not a template: lines that another program has rendered and tokenized. Each has the keys
// "input_ids" and "assistant_masks", as apply_chat_template of transformers returns them.
#define CHAT_RENDERED "rendered"
// Returns the template with this name, or NULL.
const ChatTemplate *chat_template(const char *name);
// Checks that the template's tokens are single ids. Error: EXIT_USAGE with the first one that is
// not.
bool chat_check_tokens(const ChatTemplate *t, const Tokenizer *tokenizer, Error *err);

// Ids and masks of conversations, appended to by the functions below.
typedef struct ChatTokens {
    TokenBuffer ids, mask;  // of equal counts; mask: 1 for tokens that the loss counts, else 0
    TokenBuffer lengths;    // number of ids of each conversation
    int64_t replaced;       // invalid UTF-8 sequences
    char why[256];          // why a line failed, to follow "line N"
} ChatTokens;
void chat_tokens_free(ChatTokens *tokens);
// Appends the conversations of a line: an object whose member `key` is a list of {"role":
// "system"|"user"|"assistant", "content": text}. A system message starts a new conversation. An
// assistant turn with "weight": 0 has a mask of 0. Other keys are ignored.
// Returns false and sets tokens->why if the line is not such an object, has an unknown role, an
// empty assistant turn or a key that needs CHAT_RENDERED, such as tools, or that other programs
// mask with, such as train, or if a conversation has no assistant turn of weight 1.
bool chat_encode(const ChatTemplate *t, const Tokenizer *tokenizer, Encoder *encoder, const char *key,
                 const char *line, size_t bytes, ChatTokens *tokens);
// Appends the conversation of a line of CHAT_RENDERED. Returns false and sets tokens->why if a list
// is missing, lengths differ, an id is outside the vocabulary, or no token is the assistant's.
bool chat_read_rendered(const Tokenizer *tokenizer, const char *line, size_t bytes, ChatTokens *tokens);

LLMC_END
