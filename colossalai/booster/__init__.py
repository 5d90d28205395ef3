"""The door for plugins: Booster gives components back with the methods of a plugin built in."""

from colossalai.booster._booster import Booster as Booster
