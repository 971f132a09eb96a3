/* attention_block.h for pages of float16. */
#include "attention_block.h"

void attend_float16 ATTEND(FLOAT16)
