"""advantages"""
