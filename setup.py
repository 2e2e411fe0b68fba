"""Which folders are the package: `batchsim` is sim/, with calibrate/ and scenarios/ inside it."""

from setuptools import find_packages, setup

FOLDERS = {"batchsim": "sim", "batchsim.calibrate": "calibrate", "batchsim.scenarios": "scenarios"}

setup(
    package_dir=FOLDERS,
    packages=sorted({*FOLDERS, *(f"{name}.{inner}" for name in FOLDERS for inner in find_packages(FOLDERS[name]))}),
)
