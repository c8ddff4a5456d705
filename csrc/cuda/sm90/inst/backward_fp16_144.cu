#include "../backward.cuh"

template size_t flashattn_ext::sm90::backward_bytes<__half, 144>(const flashattn_ext::AttnGradParams&);
template void flashattn_ext::sm90::backward<__half, 144>(const flashattn_ext::AttnGradParams&);
