"""Names the device that tests train on: the CPU, unless AMP_RECIPES_TEST_DEVICE names another."""

import os

import torch

from amp_recipes.modules.devices import queues_work

DEVICE = torch.device(os.environ.get("AMP_RECIPES_TEST_DEVICE", "cpu"))
QUEUES = queues_work(DEVICE)  # the verdict on an update that the device skips is known one update later
