"""Prints what a build against torch and torch_npu needs, one item per line: torch's version, its C++ ABI, header folders, library
folders, and torch_npu's version.

    python tools/find_torch_npu.py [FOLDER]      FOLDER: the files of a torch_npu that is not installed

Folders are separated by semicolons, as CMake wants them. On failure it exits with 1 and prints one line with what is missing and how to fix it.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def main() -> str | None:
    """Prints the lines; returns the problem, if there is one."""
    if find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}: install it and torch-npu of the same version"
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    release = torch.__version__.split("+")[0]
    wanted = f"pip install torch-npu=={release}"
    if len(sys.argv) > 1:
        folder, found = Path(sys.argv[1]), release
    else:
        spec = find_spec("torch_npu")
        if spec is None or not spec.submodule_search_locations:
            return f"torch_npu is not installed for {sys.executable}: {wanted}"
        folder = Path(spec.submodule_search_locations[0])
        try:
            found = version("torch-npu")
        except PackageNotFoundError:
            found = "unknown"
        if found.split(".")[:2] != release.split(".")[:2]:
            return f"torch_npu {found} does not match torch {release}: {wanted}"
    headers = folder / "include"
    includes = [headers, headers / "third_party/acl/inc", headers / "third_party/hccl/inc", *include_paths()]
    libraries = [folder / "lib", *library_paths()]
    print(torch.__version__, int(torch.compiled_with_cxx11_abi()), sep="\n")
    for paths in (includes, libraries):
        print(";".join(map(str, paths)))
    print(found)
    return None


if __name__ == "__main__":
    problem = main()
    if problem:
        print(problem)
    sys.exit(bool(problem))
