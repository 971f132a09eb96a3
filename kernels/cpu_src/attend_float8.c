/* attention_block.h for pages of float8. */
#include "attention_block.h"

void attend_float8 ATTEND(FLOAT8)
