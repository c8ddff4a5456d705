#include "../forward.cuh"

template void flashattn_ext::sm90::forward<__half, 96>(const flashattn_ext::AttnParams&);
