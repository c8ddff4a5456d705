#include "../forward.cuh"

template void flashattn_ext::sm80::forward<__nv_bfloat16, 192>(const flashattn_ext::AttnParams&);
