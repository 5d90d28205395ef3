"""The operations of a model and what each costs, without memory and without ranks."""
