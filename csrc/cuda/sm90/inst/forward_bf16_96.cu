#include "../forward.cuh"

template void flashattn_ext::sm90::forward<__nv_bfloat16, 96>(const flashattn_ext::AttnParams&);
