"""Trains a recipe at each precision and several seeds, and says whether one is worse (`amp-recipes compare`)."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter what compare takes, beside the options of the recipe, into its parser."""
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the recipe's script")
    parser.add_argument("hparams_file", metavar="YAML", type=Path, help="its YAML file")
    parser.add_argument(
        "--precisions",
        default="fp32,bf16",
        metavar="P,P",
        help="what to compare; the first is the reference (default: fp32,bf16)",
    )
    parser.add_argument(
        "--seeds",
        default="3",
        metavar="N",
        help="seeds 1 to N, or a list such as 11,12,13 (default: 3); more of them show smaller differences",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        type=Path,
        help="where the runs and the comparison go (default: results/compare/<the script's folder>)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="what to judge by: `accuracy`, or `valid.accuracy` of one stage (default: early_stop_metric, else loss)",
    )
    parser.add_argument(
        "--mode", choices=("min", "max"), help="which values of the metric are better (default: early_stop_mode)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
