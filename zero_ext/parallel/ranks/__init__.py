"""Rank layout: the grid of axes, its mapping to links, meshes and traffic."""
