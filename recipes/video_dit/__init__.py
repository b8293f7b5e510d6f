"""Trains a video diffusion transformer on Big Buck Bunny with hierarchical ZeRO."""
