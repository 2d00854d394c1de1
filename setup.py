"""Build in a new folder each time: setuptools packs all that lies in its build folder, so that a module of an earlier
version, `reference` for one, would be installed with the modules of this one."""

import tempfile

import setuptools

build = tempfile.TemporaryDirectory(prefix="dsa-build-")
setuptools.setup(options={"build": {"build_base": build.name}})
