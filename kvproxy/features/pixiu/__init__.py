"""Dubbo-go-Pixiu files, loaded unchanged: recognised by shape, mapped into our model, differences reported once."""
