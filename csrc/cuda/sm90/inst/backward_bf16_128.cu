#include "../backward.cuh"

template size_t flashattn_ext::sm90::backward_bytes<__nv_bfloat16, 128>(const flashattn_ext::AttnGradParams&);
template void flashattn_ext::sm90::backward<__nv_bfloat16, 128>(const flashattn_ext::AttnGradParams&);
