#include "../forward.cuh"

template void flashattn_ext::sm90::forward<__half, 128>(const flashattn_ext::AttnParams&);
