// The trainer as a program: build/train_gpt and build/train_gpt_cpu. See train_gpt.c.
#include "train_gpt.h"

int main(int argc, char **argv) { return train_gpt(argc, argv); }
