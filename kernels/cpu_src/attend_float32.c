/* attention_block.h for pages of float32. */
#include "attention_block.h"

void attend_float32 ATTEND(FLOAT32)
