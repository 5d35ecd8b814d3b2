"""auxiliary"""
