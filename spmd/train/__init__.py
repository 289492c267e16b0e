"""Training runs from recipes, for the command `spmd train recipe.toml` and as a library. See `docs/recipes.md`.

from spmd.train import Run

run = Run("gpt2.toml", steps=200)
run.train()
"""

from spmd.train._recipe import Recipe as Recipe
from spmd.train._recipe import RecipeError as RecipeError
from spmd.train._recipe_file import read_recipe as read_recipe
from spmd.train._recipe_file import recipe_of as recipe_of
from spmd.train._run import Run as Run

__all__ = ["Recipe", "RecipeError", "Run", "read_recipe", "recipe_of"]
