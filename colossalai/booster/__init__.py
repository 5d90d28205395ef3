"""The door for plugins: Booster gives back the components it was given, with the methods of a plugin built in."""

from colossalai.booster._booster import Booster as Booster
