"""The template of the model card. (In the repository this folder also holds the cards of real runs.)"""
