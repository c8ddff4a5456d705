#include "../backward.cuh"

template size_t flashattn_ext::sm80::backward_bytes<float, 128>(const flashattn_ext::AttnGradParams&);
template void flashattn_ext::sm80::backward<float, 128>(const flashattn_ext::AttnGradParams&);
