"""Puts the recipes and their YAML files into the package; all else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["amp_recipes", "amp_recipes.*"]),
        "amp_recipes.collection.recipes",
        "amp_recipes.collection.configs",
    ],
    package_dir={"amp_recipes.collection.recipes": "recipes", "amp_recipes.collection.configs": "configs"},
    package_data={
        "amp_recipes": ["py.typed", "templates/*/*"],
        "amp_recipes.collection.recipes": ["*/*.py", "*/README.md"],
        "amp_recipes.collection.configs": ["*.yaml"],
    },
)
